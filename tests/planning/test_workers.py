"""Processes beside a plan end with it, however and whenever it ends."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moetune.planning import workers

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


def test_when_calls_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is delayed begins if no other may; one that may not begin waits, even if a process is free."""
    spans: dict[str, tuple[float, float]] = {}

    class Calls:
        start = SimpleNamespace(model_dump_json=lambda **settings: "{}")

        def found(self, one: str) -> None:
            start = time.monotonic()
            time.sleep(0.3 if one == "a first" else 0.1)
            spans[one] = start, time.monotonic()

    def delay(one: str, running: list[str]) -> int | None:
        same = [other for other in running if other[0] == one[0]]
        return None if "last" in one and same else 1 if same else 0

    calls: Any = Calls()
    monkeypatch.setattr(workers, "_search", lambda start: calls)
    both = workers.Workers(calls)
    both._pool, both._others = ThreadPoolExecutor(1), 1  # type: ignore[assignment]  # a thread in place of a process
    inputs: Any = ["a first", "a second", "a last", "b first", "b last"]
    assert [one for one, _ in both.answers("found", inputs, lambda one: None, delay=delay)] == inputs
    began = sorted(spans, key=lambda one: spans[one])
    assert set(began[:2]) == {"a first", "b first"}
    assert began.index("a second") < began.index("a last")
    assert spans["a second"][0] < spans["a first"][1]  # nothing else was left to begin
    assert spans["a last"][0] >= max(spans["a first"][1], spans["a second"][1])


def test_what_another_process_raises_ends_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the program itself, which no result says; it must not wait for that result."""

    class Calls:
        start = SimpleNamespace(model_dump_json=lambda **settings: "{}")

        def found(self, one: str) -> None:
            if one == "broken":
                raise ZeroDivisionError(one)
            time.sleep(0.2)

    calls: Any = Calls()
    monkeypatch.setattr(workers, "_search", lambda start: calls)
    both = workers.Workers(calls)
    both._pool, both._others = ThreadPoolExecutor(1), 1  # type: ignore[assignment]  # a thread in place of a process
    inputs: Any = ["whole", "broken"]
    runner = ThreadPoolExecutor(1)
    raised = runner.submit(list, both.answers("found", inputs, lambda one: None)).exception(timeout=10)
    assert isinstance(raised, ZeroDivisionError)
