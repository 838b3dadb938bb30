"""The run file as typed values."""

import re
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from moetune.config.schema import LoraConfig, ModelConfig, RunConfig, TrainConfig
from moetune.errors import UserError


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
    with pytest.raises(ValidationError, match=r"keep_rows: 4, .* leave keep_rows out"):
        RunConfig.model_validate(raw)
    raw["train"]["keep_rows"] = "none"
    assert RunConfig.model_validate(raw).train.keep_rows == "none"


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"checkpointing": "auto", "keep_rows": 2}, "checkpointing says which rows are kept; leave keep_rows out"),
        ({"checkpointing": {"rest": "0-3"}, "keep_rows": "auto"}, "leave keep_rows out"),
        ({"checkpointing": {"rows": "3-0"}}, "runs backwards"),
        ({"checkpointing": {"host": "auto"}, "keep_rows": 2}, "leave keep_rows out"),
        ({"checkpointing": {"row": 3}}, "Extra inputs"),
        ({"checkpointing": {"rest": "auto"}}, "neither|not|list"),
        ({"checkpointing": "some"}, "'auto', 'none', 'experts_only', 'full' or 'offload'"),
    ],
)
def test_what_layers_keep_is_said_once(train: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TrainConfig.model_validate(train)
    written = {"attention": [0], "rows": "all", "rest": [2, 3], "host": "auto"}
    kept = TrainConfig.model_validate({"checkpointing": written})
    assert kept.model_dump(mode="json")["checkpointing"] == written
    assert TrainConfig.model_validate(kept.model_dump(mode="json")) == kept


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        ({}, "by target"),
        ({"attention": 4, "0-3": 2}, "by target"),
        ({"0-3": {"4": 2}}, "by target"),
        ({"0-3": 4, "3": 2}, "layer 3 has two ranks"),
        ({"attention": 4, "expert": 2}, "Did you mean 'experts'"),
        ({"attention": 4}, "'experts'"),
        ({"attention": 4, "experts": 0}, "greater than 0"),
        ({"attention": 4, "experts": {"0-3": True}}, "True is no number"),
    ],
)
def test_ranks_that_say_nothing_or_too_much(rank: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        LoraConfig.model_validate({"rank": rank, "alpha": 8})


def test_ranks_are_read_back_from_yaml() -> None:
    lora = {"rank": {"attention": 64, "experts": {"0-3": 8, 4: 16}}, "alpha": 16}
    config = RunConfig.model_validate({"model": {"path": "x"}, "adapt": {"lora": lora}})
    assert RunConfig.model_validate(yaml.safe_load(config.to_yaml())) == config
    assert config.but(adapt={"lora": {"rank": 8}}).adapt.lora.rank == 8
    assert config.but(adapt={"lora": {"rank": {"0-9": 8}}}).adapt.lora.rank == {"0-9": 8}


def test_a_model_named_outside_of_a_run_file() -> None:
    assert ModelConfig.named("a/b", dtype="fp32") == ModelConfig(path="a/b", dtype="fp32")
    with pytest.raises(UserError, match=re.escape(r"model 'a\x1b[31m': ")):
        ModelConfig.named("a\x1b[31m")
    with pytest.raises(UserError, match="model ''"):
        ModelConfig.named("")
