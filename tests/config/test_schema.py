"""The run file as typed values."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from moetune.config.schema import LoraConfig, RunConfig


def test_cards_follow_from_ranks() -> None:
    raw: dict[str, Any] = {"model": {"path": "x"}, "adapt": {}, "parallel": {"fsdp": 2, "replicate": 2}}
    assert RunConfig.model_validate(raw).hardware.count == 4
    assert RunConfig.model_validate(raw | {"hardware": {"gpu": "l40s"}}).hardware.count == 4
    with pytest.raises(ValidationError, match=r"set hardware\.count: 4"):
        RunConfig.model_validate(raw | {"hardware": {"count": 1}})


def test_a_copy_with_other_values() -> None:
    raw = {"model": {"path": "x"}, "adapt": {"lora": {"rank": 4, "alpha": 8}, "experts": {"ids": {0: [1]}}}}
    config = RunConfig.model_validate(raw)
    other = config.but(train={"steps": 3}, adapt={"lora": {"rank": 2}, "experts": {"ids": {1: (2,)}}}, output="runs/a")
    assert (other.train.steps, other.train.accumulate, other.output) == (3, 8, "runs/a")
    assert (other.adapt.lora.rank, other.adapt.lora.alpha, other.adapt.experts.ids) == (2, 8, {1: (2,)})
    assert config == RunConfig.model_validate(raw)


def test_a_change_of_ids_replaces_a_choice() -> None:
    lora = LoraConfig.model_validate({"rank": 2, "alpha": 4, "ids": {"from": "scores.json", "k": 1}})
    assert lora.but(ids={0: (1,)}).ids == {0: (1,)}
    assert lora.but(ids={"k": 2}).ids == lora.ids.but(k=2)
    assert lora.but(ids={}) == lora


def test_rows_are_kept_of_some_layers_or_of_all() -> None:
    raw: dict[str, Any] = {"model": {"path": "x"}, "adapt": {}, "train": {"checkpointing": "none", "keep_rows": 4}}
    with pytest.raises(ValidationError, match=r"keep_rows: 4, .* set checkpointing: experts_only"):
        RunConfig.model_validate(raw)
    raw["train"]["keep_rows"] = "none"
    assert RunConfig.model_validate(raw).train.keep_rows == "none"
