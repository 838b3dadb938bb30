"""How long a step takes: the formula, the steps that cards took, and runs that others have published."""

import sys
from pathlib import Path
from typing import Any

import pytest

from moetune.config.schema import RunConfig
from moetune.memory.time.estimate import (
    LAUNCH,
    MEASURED,
    OWN_LAUNCH,
    REACHED,
    SPREAD,
    SPREAD_ELSEWHERE,
    Duration,
    duration,
)
from moetune.memory.time.work import Work
from moetune.memory.trace import trace
from moetune.models.catalog.gpus import find_gpu
from moetune.run.resolve import resolve

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts/bench"))
from step_times import estimated, fitted, points, traced

CARD = find_gpu("h100")
POINTS = points()


def estimate(work: Work, card: str = "h100", tokens: int = 1000) -> Duration:
    found = duration({"experts": work}, tokens, find_gpu(card))
    assert found is not None
    return found


def test_a_step_takes_as_long_as_the_slower_of_card_and_host() -> None:
    assert CARD.bf16 is not None
    assert CARD.bandwidth is not None
    card = estimate(Work(flops=4e14, bytes=1e11, launches=1000))
    seconds = (4e14 / CARD.bf16.value + 1e11 / CARD.bandwidth.value) / REACHED
    assert card.seconds.fast == pytest.approx(seconds * SPREAD.fast)
    assert card.seconds.slow == pytest.approx(seconds * SPREAD.slow)
    assert card.tokens_per_second.fast == pytest.approx(1000 / card.seconds.fast)
    assert card.share.fast == pytest.approx(4e14 / card.seconds.fast / CARD.bf16.value)
    host = estimate(Work(flops=4e14, bytes=1e11, launches=30_000, own_launches=20_000))
    assert host.seconds.fast == pytest.approx((10_000 * LAUNCH + 20_000 * OWN_LAUNCH) * SPREAD.fast)
    assert host.parts["experts"] == card.parts["experts"]


def test_what_runs_beside_the_card_counts_at_the_slow_end_only() -> None:
    rest, transfers = Work(bytes=1e12, launches=100), Work(copied=1e9)
    both, without = duration({"rest": rest, "transfers": transfers}, 1, CARD), duration({"rest": rest}, 1, CARD)
    assert both is not None
    assert without is not None
    assert both.seconds.fast == without.seconds.fast
    assert both.seconds.slow == pytest.approx(without.seconds.slow + both.parts["transfers"].slow)


def test_a_card_of_a_kind_that_was_never_measured_has_a_wider_range() -> None:
    here, elsewhere = estimate(Work(flops=1e14)), estimate(Work(flops=1e14), "l40s")
    assert (here.of_card, elsewhere.of_card) == (True, False)
    assert here.seconds.slow < 3 * here.seconds.fast
    assert elsewhere.seconds.slow == pytest.approx(elsewhere.seconds.fast * SPREAD_ELSEWHERE.slow / SPREAD.fast)


def test_what_was_measured_stands_in_for_the_estimate() -> None:
    measured = estimate(Work(flops=1e14), tokens=2000).as_measured(500.0)
    assert measured.seconds.fast == measured.seconds.slow == 4.0
    assert measured.hours(1_800_000).slow == pytest.approx(1.0)


def test_of_a_card_given_by_its_size_nothing_is_said() -> None:
    assert duration({"experts": Work(flops=1)}, 1, find_gpu("44GiB")) is None


# --- Steps that were measured -------------------------------------------------------------------------------------


def test_the_constants_are_those_that_fit_the_points() -> None:
    assert fitted(POINTS) == pytest.approx((LAUNCH, OWN_LAUNCH), rel=0.03)
    assert {find_gpu(point["card"]).capability for point in POINTS} == MEASURED


@pytest.mark.parametrize("number", range(len(POINTS)), ids=[point["name"] for point in POINTS])
def test_every_point_lies_in_the_range(number: int) -> None:
    """Also in that of constants fitted to the others."""
    point, others = POINTS[number], POINTS[:number] + POINTS[number + 1 :]
    found = estimate(Work(**point["work"]), point["card"], point["tokens"])
    assert found.seconds.fast < point["seconds"] < found.seconds.slow
    assert found.seconds.fast == pytest.approx(estimated(point, LAUNCH, OWN_LAUNCH) * SPREAD.fast)
    assert SPREAD.fast < point["seconds"] / estimated(point, *fitted(others)) < SPREAD.slow


@pytest.mark.full
@pytest.mark.parametrize("point", [pytest.param(point, id=point["name"]) for point in POINTS])
def test_the_work_of_a_point_is_what_a_trace_counts(point: dict[str, Any]) -> None:
    assert traced(point) == point["work"], "run scripts/bench/step_times.py --trace"


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "gpu", "train", "published"),
    [
        # Unsloth 2026.9, QLoRA of rank 16 on attention and experts: two rows of about 1,700 tokens
        ("mixtral-8x7b", "rtx-5090", {"micro_batch": 2, "sequence_length": 1700}, (447, 537)),
        # Axolotl, LoRA of rank 16 on NF4, rows of 4,096 tokens
        ("gemma-4-26b-a4b", "rtx-pro-6000", {"sequence_length": 4096}, (1940, 1940)),
    ],
)
def test_published_runs_lie_in_the_range(
    model: str, gpu: str, train: dict[str, int], published: tuple[int, int]
) -> None:
    config = RunConfig.model_validate(
        {
            "model": {"path": model, "weights": "random"},
            "adapt": {"lora": {"rank": 16, "alpha": 16, "targets": ["attention", "experts"]}},
            "optimizer": {"name": "adamw8bit"},
            "train": {"accumulate": 1, **train},
        }
    )
    tokens = config.train.micro_batch * config.train.sequence_length
    found = duration(trace(resolve(config, "cuda"), gpu=find_gpu(gpu)).work, tokens, find_gpu(gpu))
    assert found is not None
    speed = found.tokens_per_second
    assert speed.slow <= published[0] <= published[1] <= speed.fast, speed
    assert speed.fast < 7 * speed.slow, "a range that says nothing"
