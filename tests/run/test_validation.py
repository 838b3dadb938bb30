"""Refusals of a run file, all at once and before a weight is read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from moetune.errors import UserError
from moetune.memory.measurement.measure import measure
from moetune.run import validation
from moetune.run.resolve import examine, resolve
from moetune.watch.train import train
from tests import small
from tests.run.test_resolve import EVERYTHING, config_of
from tests.toys import toy_config


def test_every_problem_is_told_at_once(small_model: Path) -> None:
    config = config_of(
        small_model,
        {"router": "9", "lora": EVERYTHING["lora"]},
        model={"base": "fp32", "dtype": "bf16"},
        optimizer={"name": "adafactor"},
        parallel={"fsdp": 3, "ep": 3, "load": "missing.json"},
        hardware={"count": 3},
    )
    with pytest.raises(UserError) as error:
        resolve(config, "cuda")
    problems = str(error.value).splitlines()
    beginnings = ("model.base: fp32", "adapt.router: layer 9", "optimizer: over several ranks ada", "parallel.ep: 3")
    assert len(problems) == len(beginnings)
    assert all(any(problem.startswith(beginning) for problem in problems) for beginning in beginnings)
    assert list(examine(config, "cuda").problems) == problems


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a base in other bits": ({"model": {"base": "bf16", "dtype": "fp16"}}, r"model\.base: bf16 does not go with"),
    "float16 without float32 updates": (
        {"model": {"dtype": "fp16"}, "optimizer": {"name": "sgd"}},
        r"model\.dtype: fp16 and sgd on model\.layers\.0\.mlp\.gate\.weight",
    ),
    "a part without an optimizer": ({"optimizer": {"experts": {"name": "sgd"}}}, r"optimizer\.router is missing"),
    "a part that does not train": (
        {"optimizer": {"router": {}, "lora": {}}},
        r"optimizer\.lora: adapt: chooses nothing of that part",
    ),
    "packed attention that shall be split": (
        {"parallel": {"tp": 2}, "hardware": {"count": 2}},
        r"parallel\.tp: .*q_proj is quantized",
    ),
    "rows of more layers than there are": ({"train": {"keep_rows": 3}}, r"train\.keep_rows: 3, .* set 2"),
    "layers that there are not": (
        {"train": {"checkpointing": {"rest": [1, 2]}}},
        r"train\.checkpointing\.rest: 2, and 'mixtral' has the layers 0-1",
    ),
    "inputs on the host of a layer that is not recomputed": (
        {"train": {"checkpointing": {"rest": [0, 1], "host": 1}}},
        r"train\.checkpointing\.host: 1, and layers in rest keep their input",
    ),
    "an output that is not there": (
        {"train": {"checkpointing": {"attention": "all"}}, "model": {"attention": "eager"}},
        r"train\.checkpointing\.attention: eager attention has no kernel",
    ),
    "factors to share, and none of experts": (
        {"adapt": {"lora": {"rank": 2, "alpha": 4, "targets": ["attention"], "share": "outer"}}},
        r"adapt\.lora\.share: outer is about factors of experts",
    ),
    "factors that experts on several ranks share": (
        {
            "adapt": {"lora": {"rank": 2, "alpha": 4, "share": "outer"}},
            "parallel": {"fsdp": 2, "ep": 2},
            "hardware": {"count": 2},
        },
        r"adapt\.lora\.share: outer: parallel\.ep: 2",
    ),
    "weights that are gathered too late": (
        {
            "adapt": {"lora": {"rank": 2, "alpha": 4, "targets": ["router"]}},
            "parallel": {"engine": "deepspeed", "fsdp": 2, "zero": 3},
            "hardware": {"count": 2},
        },
        r"(?s)adapt\.lora: .*gate adds LoRA to its weight.*parallel\.zero: 2.*deepspeed and parallel\.zero 3",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, small_model: Path) -> None:
    sections, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        resolve(config_of(small_model, **sections), "cuda")


def test_layers_that_run_several_times(small_model: Path) -> None:
    """An expert's update in the backward pass of one call would come before that of another."""
    run = resolve(config_of(small_model, parallel={"pp": 2}, train={"accumulate": 2}), "cuda")
    assert not any("several times" in problem for problem in validation.problems_of(run))
    looped = replace(run, model=replace(run.model, is_looped=True))
    found = [problem for problem in validation.problems_of(looped) if "several times" in problem]
    assert ["can be counted, not trained" in found[0], "set parallel.pp: 1" in found[1]] == [True, True]


def test_routers_without_a_gradient(tmp_path: Path) -> None:
    """One expert a token, whose weight is divided by itself: what reaches the router is rounding alone."""
    routers: dict[str, Any] = {
        "whole": {"router": "all"},
        "factors": {"lora": EVERYTHING["lora"] | {"targets": ["router"]}},
    }
    toy_config("qwen3_moe", num_experts_per_tok=1, norm_topk_prob=True).save_pretrained(tmp_path / "one")
    for adapt in routers.values():
        with pytest.raises(UserError, match="gate would train without a gradient"):
            resolve(config_of(tmp_path / "one", adapt), "cpu")
    resolve(config_of(tmp_path / "one", routers["whole"], train={"router_aux_loss": 0.01}), "cpu")
    toy_config("qwen3_moe", num_experts_per_tok=1, norm_topk_prob=False).save_pretrained(tmp_path / "weighted")
    resolve(config_of(tmp_path / "weighted", routers["whole"]), "cpu")


def test_router_losses_of_a_dense_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(**sizes).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="'llama' is a dense model without routers"):
        resolve(config_of(tmp_path, {"also": ["norm"]}, train={"router_z_loss": 0.1}), "cuda")


def test_a_model_that_embeds_tokens_outside_of_its_layers_is_not_sharded(tmp_path: Path) -> None:
    toy_config("llama4").save_pretrained(tmp_path)
    two = {"hardware": {"count": 2}, "model": {"weights": "random"}}
    resolve(config_of(tmp_path, {"router": "all"}, parallel={"replicate": 2}, **two), "cuda")
    with pytest.raises(UserError, match=r"parallel\.fsdp: 2 would shard layers of 'llama4', whose tokens"):
        resolve(config_of(tmp_path, {"router": "all"}, parallel={"fsdp": 2}, **two), "cuda")


def test_a_checkpoint_in_a_format_that_is_not_read_is_refused_unless_its_weights_are_drawn(tmp_path: Path) -> None:
    config = toy_config("mixtral").to_dict() | {"quantization_config": {"quant_method": "aqlm"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"already quantized \(aqlm\).* or a bf16 checkpoint"):
        resolve(config_of(tmp_path, {"router": "all"}), "cuda")
    drawn = resolve(config_of(tmp_path, {"router": "all"}, model={"weights": "random"}), "cuda")
    assert drawn.config.model.base == "nf4"
    with pytest.raises(UserError, match="already quantized"):
        resolve(config_of(tmp_path, {"router": "all"}), "cuda", like=drawn)


FLASH: dict[str, Any] = {"model": {"attention": "flash_attention_2"}}


def test_attention_without_its_package_is_refused_with_all_else(
    small_model: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a run takes place, before a weight is read; a prediction is for another machine."""
    config = small.run_config(
        small_model,
        tmp_path / "none.jsonl",
        tmp_path / "run",
        model={**FLASH["model"], "base": "bf16", "dtype": "fp16"},
    )
    with pytest.raises(UserError) as error:
        train(examine(config, "cpu"), dry_run=True)
    for problem in ("flash_attention_2 needs a CUDA GPU", "model.base: bf16 does not go with", "none.jsonl"):
        assert problem in str(error.value)
    run = resolve(config_of(small_model, **FLASH), "cpu")
    with pytest.raises(UserError, match="flash_attention_2 needs a CUDA GPU"):
        measure(run, "cpu", 1)
    monkeypatch.setattr(validation, "is_flash_attn_2_available", lambda: False)
    (problem,) = validation.missing_packages(run.config, "cuda")
    assert "needs the package flash-attn, which is not installed" in problem
    monkeypatch.setattr(validation, "is_flash_attn_2_available", lambda: True)
    assert not list(validation.missing_packages(run.config, "cuda"))
