"""`processes`: a multiprocessing context whose processes are forked from a copy of this one, which has imported all."""

import multiprocessing
import os
import sys
import traceback
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from unittest.mock import patch

processes = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Fork the server from which `processes` are forked: before tests start threads, whose locks a fork would have."""
    resource_tracker.ensure_running()
    with patch.object(util, "spawnv_passfds", _forked):
        forkserver.ensure_running()


def _forked(_: object, command: Sequence[str], kept: Sequence[int]) -> int:
    """Run the program `command` ends with, Python's own for a server, in a fork with those file descriptors only."""
    if pid := os.fork():
        return pid
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in {*map(int, os.listdir("/dev/fd"))} - {0, 1, 2, *kept}:
            os.dup2(null, descriptor)  # whoever writes there or closes it does so to no file that is opened later
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        exec(command[-1])
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # nothing that the tests' process does at its end
    return 0
