"""Changes that make a run fit: the mildest first, none that does not, and several only where one is not enough."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from moetune.config.schema import RunConfig
from moetune.memory.report import GpuMemory, LoadPeaks, MemoryReport, Parts
from moetune.planning.predict import predict
from moetune.planning.savings import changed, fitting, savings
from tests.report.sample import GIB, MIB, rank, sample

RAW: dict[str, Any] = {
    "model": {"path": "model", "base": "bf16"},
    "adapt": {"experts": {"layers": "0", "ids": [0]}, "lora": {"rank": 16, "alpha": 16}},
    "optimizer": {"name": "adamw", "master_weights": "fp32"},
    "train": {"micro_batch": 4, "sequence_length": 2048, "accumulate": 2, "checkpointing": "none"},
}
MILDEST_FIRST = [
    "train.checkpointing=full",
    "optimizer.offload=True",
    "train.checkpointing=offload",
    "model.embeddings_on=host",
    "model.experts_on=host",
    "optimizer.master_weights=stochastic",
    "optimizer.name=adamw8bit",
    "adapt.lora.dtype=bf16",
    "model.base=nf4",
    "train.micro_batch=1",
    "train.sequence_length=1024",
    "adapt.lora.share=outer",
    "adapt.lora.rank=8",
    "optimizer.name=sgd",
]


def needs(config: RunConfig, size: int) -> MemoryReport:
    """By a rule of thumb: 8 GiB of frozen weights, 8 of states, 4 of master weights, 8 of activations."""
    optimizer, train = config.optimizer, config.train
    frozen = 0 if config.model.experts_on == "host" else 8 if config.model.base == "bf16" else 2
    states = {"adamw": 8, "adamw8bit": 2, "sgd": 0}[optimizer.name]  # type: ignore[union-attr]
    masters = 4 if optimizer.master_weights == "fp32" else 0  # type: ignore[union-attr]
    kept = {"none": 4, "full": 1, "offload": 0}[train.checkpointing]  # type: ignore[index]
    activations = kept * train.micro_batch * train.sequence_length * GIB // 4096
    if optimizer.offload:  # type: ignore[union-attr]
        states = masters = 0
    parts = Parts(frozen * GIB, 0, 0, states * GIB, masters * GIB, activations, 0)
    return sample(gpu=GpuMemory("card", size), ranks=(rank(0, parts),), load=LoadPeaks(0, 0))


def offered(size: int, **sections: Any) -> list[tuple[str, ...]]:
    config = RunConfig.model_validate(RAW | sections)
    return [one.flags for one in fitting(config, needs(config, size), lambda other: needs(other, size))]


def test_the_mildest_is_first() -> None:
    config = RunConfig.model_validate(RAW)
    first = [next(iter(one.settings.items())) for one in savings(config)]
    assert [f"{key}={value}" for key, value in first] == MILDEST_FIRST


def test_rows_that_are_kept_are_given_up_first() -> None:
    config = RunConfig.model_validate(RAW | {"train": {"keep_rows": 4, "checkpointing": "full"}})
    first = next(savings(config))
    assert first.settings == {"train.keep_rows": "none"}
    assert changed(config, first.settings).train.keep_rows == "none"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("gib", range(12, 28))
def test_none_is_offered_that_does_not_fit(gib: int) -> None:
    """Single changes in their order, those that fit and no others; else several, none of which can be left out."""
    size = gib * GIB + 640 * MIB
    config = RunConfig.model_validate(RAW)

    def surely(settings: Mapping[str, object], size: int) -> bool:
        return needs(changed(config, settings), size).verdict == "yes"

    single = [one.settings for one in savings(config) if surely(one.settings, size)]
    found = offered(size)
    if single:
        assert found == [tuple(f"{key}={value}" for key, value in settings.items()) for settings in single]
        return
    (together,) = found

    def fit(flags: Sequence[str]) -> bool:
        return surely(dict(flag.split("=") for flag in flags), size)

    assert len(together) > 1
    assert fit(together)
    assert not any(fit([other for other in together if other != flag]) for flag in together)


def test_nothing_is_offered_where_the_context_alone_is_too_large() -> None:
    assert offered(640 * MIB) == []


@pytest.mark.full
def test_what_is_said_to_be_needed_is_predicted_of_the_changed_run(small_model: Path) -> None:
    """To the byte."""
    raw = {
        "model": {"path": str(small_model)},
        "adapt": {"router": "all", "experts": {"layers": "1", "ids": [2]}},
        "train": {"sequence_length": 1024, "micro_batch": 4, "accumulate": 1},
    }
    config = RunConfig.model_validate(raw)
    before = predict(config, gpu="80GiB").required
    report = predict(config, gpu=f"{before - 1}B")
    assert report.changes
    for change in report.changes:
        other = changed(config, dict(setting.split("=") for setting in change.settings))
        after = predict(other, gpu=f"{before - 1}B")
        assert (after.verdict, change.fits) == ("yes", True)
        assert after.required == change.peak_process == report.required - change.saves
