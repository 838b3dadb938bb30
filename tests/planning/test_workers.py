"""Processes beside a plan end with it, however and whenever it ends."""

import os
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import time
from types import SimpleNamespace
from moetune.planning.workers import Workers
workers = Workers(SimpleNamespace(start=SimpleNamespace(model_dump_json=lambda **settings: "{}")), 3)
print("started", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "after"),
    [
        (signal.SIGKILL, 1.5),
        *(
            pytest.param(number, after, marks=pytest.mark.full)
            for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
            for after in (0.0, 0.3, 4.0)
        ),
    ],
)
def test_none_outlives_the_plan(number: signal.Signals, after: float) -> None:
    plan = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, start_new_session=True)
    assert plan.stdout is not None
    assert plan.stdout.readline() == b"started\n"
    time.sleep(after)
    plan.send_signal(number)
    plan.stdout.close()
    plan.wait(20)
    until = time.monotonic() + 20
    while is_there(plan.pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert not is_there(plan.pid)


def is_there(group: int) -> bool:
    """Whether any process of a group is."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
