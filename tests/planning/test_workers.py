"""Processes beside a plan end with it, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moetune.errors import UserError
from moetune.planning.search import Search
from moetune.planning.workers import calling
from tests.planning.test_search import search_of

PROGRAM = """
import sys, time
from moetune.planning.search import Search
from moetune.planning.workers import calling
from tests.planning.test_search import search_of
Search.wait = lambda search, seconds: time.sleep(seconds) or seconds
with calling(search_of(sys.argv[1], "44GiB"), 2) as call:
    assert next(call("wait", [0.01, 60])) == 0.01
    print("started", flush=True)
    time.sleep(60)
"""


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_none_outlives_the_plan(number: signal.Signals, small_model: Path) -> None:
    words = [sys.executable, "-c", PROGRAM, str(small_model)]
    plan = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    assert plan.stdout is not None
    assert plan.stdout.readline() == b"started\n"
    plan.send_signal(number)
    plan.wait(20)
    for _ in range(200):
        time.sleep(0.1)
        try:
            os.killpg(plan.pid, 0)
        except ProcessLookupError:
            return
    pytest.fail("a process of the group is left")


def test_a_process_that_is_killed_is_told(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Search, "end", lambda search, status: os._exit(status), raising=False)
    with (
        pytest.raises(UserError, match="a process of the search was killed"),
        calling(search_of(small_model, "44GiB"), 2) as call,
    ):
        list(call("end", [1, 2]))
