"""A synthetic card, whose speeds are known, is measured: estimates on it hold, and range less than twofold."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from moetune.memory.time import bench, roofline, speeds
from moetune.memory.time.bench import Call, measured, seconds_of
from moetune.memory.time.speeds import KINDS, Kind, Point, Speeds, speeds_of
from moetune.memory.time.work import Work, WorkPart
from moetune.models.catalog.gpus import Gpu, find_gpu

CARD = find_gpu("l40s")
SHARES: dict[Kind, tuple[float, float]] = {
    "products": (0.62, 0.78),
    "attention": (0.5, 0.6),
    "memory": (0.74, 0.9),
    "unpacking": (0.4, 0.5),
    "link": (0.7, 0.8),
    "launch": (5e-6, 7.5e-6),
    "synchronization": (12e-6, 15e-6),
}
"""What calls on the synthetic card reach: the share of a limit, or seconds of an event, by the call."""


def seconds(kind: Kind, work: Work, draw: Random) -> float:
    factor = draw.uniform(*SHARES[kind])
    ideal = Point(kind, "", bench._numbers(work), 1.0).factor(CARD)
    return ideal * factor if kind in speeds.PER_EVENT else ideal / factor


def drawn_points(seed: int) -> tuple[Point, ...]:
    draw = Random(seed)

    def clock(call: Call) -> float:
        if call.kind in speeds.PER_EVENT:
            return draw.uniform(*SHARES[call.kind]) * (call.work.launches or call.work.synchronizations)
        return seconds(call.kind, call.work, draw)

    return measured(CARD, torch.device("meta"), clock)


def made(seed: int = 0) -> Speeds:
    return Speeds(f"{CARD.full_name}, 8.9", "driver", {"torch": torch.__version__}, drawn_points(seed))


@pytest.fixture
def points() -> tuple[Point, ...]:
    return drawn_points(0)


def test_every_speed_is_measured_at_several_calls(points: tuple[Point, ...]) -> None:
    for kind in KINDS:
        of_kind = [one for one in points if one.kind == kind]
        assert len(of_kind) > 1
        assert len({one.what for one in of_kind}) == len(of_kind)
        for one in of_kind:
            low, high = SHARES[kind]
            assert low * 0.999 < one.factor(CARD) < high * 1.001, one


def test_what_is_left_out_lies_in_the_range() -> None:
    """Points that were measured do; of points of the same card that were not, nine of ten."""
    inside = []
    for seed in range(20):
        found, others = made(seed), drawn_points(1000 + seed)
        for kind, between in found.factors(CARD).items():
            low, high = sorted((between.fast, between.slow))
            for one in found.points:
                assert one.kind != kind or low <= one.factor(CARD) <= high
            inside += [low <= one.factor(CARD) <= high for one in others if one.kind == kind]
    assert sum(inside) >= 0.9 * len(inside), sum(inside) / len(inside)


def test_a_lone_outlier_widens_the_range_by_its_distance() -> None:
    def point(share: float) -> Point:
        return Point("memory", "", {"bytes": CARD.bandwidth.value}, 1 / share)

    found = Speeds("", "", {}, (point(0.8), point(0.75), point(0.5)))
    between = found.factors(CARD)["memory"]
    assert between.slow == pytest.approx(0.5 / 1.5)  # without 0.5 the lowest is 0.75, which is 1.5 times that
    assert between.fast == 1.0


def step(draw: Random) -> tuple[dict[WorkPart, Work], float]:
    """A step bound by the card, of a model of experts, and the seconds that it takes on the synthetic card."""
    flops = 10 ** draw.uniform(13, 15)
    work: dict[WorkPart, Work] = {
        "experts": Work(flops=flops, product_bytes=flops / 900, bytes=flops / 3000),
        "attention": Work(flops=flops / draw.uniform(3, 9), bytes=flops / 9000),
        "head_and_loss": Work(flops=flops / 20),
        "dequantization": Work(bytes=flops / draw.uniform(3000, 9000)),
        "rest": Work(bytes=flops / 4000, launches=draw.uniform(0.05, 0.1) * flops / 4e14 / 6e-6),
    }
    taken = 0.0
    for part, done in work.items():
        product: Kind = "attention" if part == "attention" and draw.random() < 0.3 else "products"
        taken += seconds(product, Work(flops=done.flops), draw) if done.flops else 0
        memory: Kind = "unpacking" if part == "dequantization" else "memory"
        taken += seconds(memory, Work(bytes=done.bytes), draw) if done.bytes else 0
    host = work["rest"].launches * draw.uniform(*SHARES["launch"])
    return work, max(taken, host) + draw.random() * min(taken, host)


def test_estimates_hold_and_range_less_than_twofold(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, found = Random(1), made()
    for _ in range(200):
        work, taken = step(draw)
        monkeypatch.setattr(roofline, "speeds_of", lambda card: None)
        wide = roofline.duration(work, 1000, CARD)
        monkeypatch.setattr(roofline, "speeds_of", lambda card: found)
        one = roofline.duration(work, 1000, CARD)
        assert wide is not None
        assert one is not None
        assert (wide.of_card, one.of_card) == (False, True)
        assert one.seconds.fast <= taken <= one.seconds.slow
        assert one.seconds.slow < 2 * one.seconds.fast
        assert wide.seconds.slow > 3.5 * wide.seconds.fast


class Machine:
    """Stands in for torch.cuda: one card, by name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_available(self) -> bool:
        return True

    def get_device_name(self, device: object) -> str:
        return self.name

    def get_device_capability(self, device: object) -> tuple[int, int]:
        return 8, 9


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    monkeypatch.setenv("MOETUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch, "cuda", Machine(CARD.full_name))
    monkeypatch.setattr(speeds, "driver_here", lambda: "driver")
    speeds._kept.cache_clear()
    yield CARD
    speeds._kept.cache_clear()


def test_they_are_kept_for_this_card_driver_and_torch(machine: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    assert speeds_of(machine) is None
    found = replace(Speeds.here(torch.device("cpu")), points=drawn_points(0))
    found.keep()
    assert speeds_of(machine) == found
    assert speeds_of(find_gpu("h100")) is None
    monkeypatch.setattr(speeds, "driver_here", lambda: "another")
    speeds._kept.cache_clear()
    assert speeds_of(machine) is None
    monkeypatch.setattr(speeds, "driver_here", lambda: "driver")
    found.file.write_bytes(found.file.read_bytes()[:-9])
    speeds._kept.cache_clear()
    assert speeds_of(machine) is None


def test_seconds_of_a_call() -> None:
    calls = []
    assert 0 < seconds_of(torch.device("cpu"), lambda: calls.append(0), 3) < 1
    assert len(calls) == 4
