"""Processes beside a plan end with it, however and whenever it ends."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moetune.planning.workers import Workers

PROGRAM = """
import time
from moetune.planning.workers import Workers
class Search:
    structure = None
    def wait(self, seconds):
        time.sleep(seconds)
        return seconds
workers = Workers(Search(), 3)
results = workers.results("wait", [0.01, 60, 60])
assert next(results) == 0.01
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
    assert is_gone(plan.pid)


def is_gone(group: int) -> bool:
    """Whether no process of a group is left, within 20 seconds."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


PLAN = """
import sys
from moetune.planning.plan import plan
print("started", flush=True)
found = plan(sys.argv[1], "600MiB", length=64, processes=2)
print([(one.amount, one.strategy.words, one.report.required) for one in found.candidates], flush=True)
"""


@pytest.mark.full
def test_a_killed_plan_leaves_no_process_and_no_damaged_record(small_model: Path, tmp_path: Path) -> None:
    draw, words = random.Random(0), [sys.executable, "-c", PLAN, str(small_model)]

    def begin(cache: str) -> subprocess.Popen[bytes]:
        given = os.environ | {"MOETUNE_CACHE": str(tmp_path / cache)}
        plan = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True, env=given)
        assert plan.stdout is not None
        assert plan.stdout.readline() == b"started\n"
        return plan

    start = time.monotonic()
    whole = begin("whole").communicate()[0]
    took = time.monotonic() - start
    assert b"adamw" in whole
    for _ in range(20):
        plan = begin(str(draw.choice(("new", "killed"))))
        time.sleep(draw.uniform(0, took))
        plan.send_signal(draw.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)))
        plan.communicate()
        assert is_gone(plan.pid)
        for file in tmp_path.glob("*/*.json.gz"):
            json.loads(gzip.decompress(file.read_bytes()).partition(b"\n")[2])
    for cache in ("new", "killed"):
        assert begin(cache).communicate()[0] == whole


class Calls:
    """In place of a `Search`."""

    structure = None

    def twice(self, number: int) -> int:
        if number < 0:
            raise ZeroDivisionError(number)
        return 2 * number

    def mine(self, _: int) -> int:
        return os.getpid()

    def end(self, parent: int) -> bool:
        if os.getpid() != parent:
            os._exit(9)  # as the system ends a process when memory runs out
        return True


def test_results_come_in_order_from_other_processes() -> None:
    calls: Any = Calls()
    with Workers(calls, 2) as workers:
        assert list(workers.results("twice", range(5))) == [0, 2, 4, 6, 8]
        assert os.getpid() not in workers.results("mine", range(3))
        with pytest.raises(ZeroDivisionError):
            list(workers.results("twice", [1, -1]))
    with Workers(calls) as workers:
        assert {*workers.results("mine", range(3))} == {os.getpid()}


def test_what_a_killed_process_leaves_this_one_does() -> None:
    calls: Any = Calls()
    with Workers(calls, 2) as workers:
        assert list(workers.results("end", [os.getpid()] * 3)) == [True] * 3
        assert list(workers.results("twice", [4])) == [8]
