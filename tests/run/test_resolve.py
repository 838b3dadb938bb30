"""One description of a run: made once, and with every problem that needs no weights."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig

from moetune.adapt.build import build
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.memory.measure import measure
from moetune.models.source import find_model_source
from moetune.models.structure import meta_model, read_structure
from moetune.run import validation
from moetune.run.resolve import examine, resolve
from moetune.watch.train import train
from tests import small
from tests.toys import toy_config

EVERYTHING: dict[str, Any] = {
    "router": "1",
    "experts": {"layers": "0-1", "ids": [0, 2]},
    "lora": {"rank": 2, "alpha": 4, "targets": ["attention", "experts"]},
    "also": ["norm", "embedding"],
}


def config_of(path: Path, adapt: dict[str, Any] | None = None, /, **sections: Any) -> RunConfig:
    model = {"path": str(path)} | sections.pop("model", {})
    return RunConfig.model_validate({"model": model, "adapt": adapt or {"router": "all"}} | sections)


# --- Once ---------------------------------------------------------------------------------------------------------


def test_a_training_start_resolves_once(
    small_model: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source is found, the model built on the meta device and its structure read one time each, by whatever name a
    module knows these functions."""
    called: Counter[str] = Counter()
    for function in (find_model_source, meta_model, read_structure):

        def counted(*args: Any, function: Any = function) -> Any:
            called[function.__name__] += 1
            return function(*args)

        for module in [module for name, module in sys.modules.items() if name.startswith("moetune.")]:
            if getattr(module, function.__name__, None) is function:
                monkeypatch.setattr(module, function.__name__, counted)
    config = small.run_config(small_model, small_data, tmp_path / "run", "experts", train={"steps": 1})
    train(resolve(config, "cpu"))
    assert called == {"find_model_source": 1, "meta_model": 1, "read_structure": 1}


def test_a_run_on_the_same_model_takes_it_over(small_model: Path) -> None:
    first = resolve(config_of(small_model), "cuda")
    same = resolve(config_of(small_model, EVERYTHING), "cuda", like=first)
    assert same.model.plain is first.model.plain
    assert same.selection == resolve(config_of(small_model, EVERYTHING), "cuda").selection
    other = resolve(config_of(small_model, model={"dtype": "fp32"}), "cuda", like=first)
    assert other.model.plain.dtype == torch.float32


def test_building_leaves_the_run_as_it_was(small_model: Path) -> None:
    run = resolve(config_of(small_model, EVERYTHING), "cpu")
    before = {name: (p.shape, p.dtype, p.requires_grad) for name, p in run.model.plain.named_parameters()}
    kinds = [type(module) for module in run.model.plain.modules()]
    one, two = build(run, "cpu"), build(run, "cpu")
    assert {name: (p.shape, p.dtype, p.requires_grad) for name, p in run.model.plain.named_parameters()} == before
    assert [type(module) for module in run.model.plain.modules()] == kinds
    assert all(p.equal(two.trainable()[name]) for name, p in one.trainable().items())


# --- What it says -------------------------------------------------------------------------------------------------


def test_every_trained_parameter_has_a_part(small_model: Path) -> None:
    run = resolve(config_of(small_model, EVERYTHING), "cuda")
    trainable = build(run, "meta").trainable()
    assert run.parts.keys() == trainable.keys()
    routers = {part.name for part in run.structure.parameters_of("router")}
    for name, part in run.parts.items():
        if part in ("router", "other"):
            assert (name in routers) == (part == "router")
            assert trainable[name].shape == run.model.plain.get_parameter(name).shape
        else:
            assert ("trained" in name) == (part == "experts"), name
    assert [*run.parts.values()].count("experts") == 2 * 2 * 2
    assert [*run.parts.values()].count("lora") == 2 * (4 * 2 + 4)


def test_a_bias_beside_factors_is_no_factor(tmp_path: Path) -> None:
    """Parts follow from what was chosen, though PEFT moves the bias into a module of its own."""
    toy_config("qwen2_moe").save_pretrained(tmp_path)
    adapt = {"lora": {"rank": 2, "alpha": 2, "targets": ["q_proj"]}, "also": ["model.layers.0.self_attn.q_proj.bias"]}
    run = resolve(config_of(tmp_path, adapt, model={"weights": "random"}), "cuda")
    name = "model.layers.0.self_attn.q_proj.base_layer.bias"
    assert run.parts[name] == "other"
    assert name in build(run, "meta").trainable()


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "bf16"), ("cpu", "fp32")])
def test_auto_has_one_rule(device: Any, dtype: str, small_model: Path) -> None:
    run = resolve(config_of(small_model), device)
    assert run.config.model.dtype == dtype
    assert run.dtype == run.model.plain.dtype == {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    assert build(run, "cpu").model.dtype == build(run, "meta").model.dtype == run.dtype


def test_optimizers_are_those_of_the_parts_that_train(small_model: Path) -> None:
    assert resolve(config_of(small_model), "cuda").optimizers.keys() == {"router"}
    assert resolve(config_of(small_model, EVERYTHING), "cuda").optimizers.keys() == {
        "router",
        "experts",
        "lora",
        "other",
    }
    both = {"router": {"name": "sgd"}, "lora": {"name": "adamw"}}
    adapt = {"router": "0", "lora": EVERYTHING["lora"]}
    assert resolve(config_of(small_model, adapt, optimizer=both), "cuda").optimizers["router"].name == "sgd"


def test_experts_are_placed(small_model: Path) -> None:
    run = resolve(config_of(small_model, parallel={"fsdp": 2, "ep": 2}, hardware={"count": 2}), "cuda")
    assert run.placement == dict.fromkeys((0, 1), ((0, 1), (2, 3)))
    assert run.placed_at(1).held(0, 4) == (2, 3)
    assert resolve(config_of(small_model), "cuda").placed_at(0).held(0, 4) == (0, 1, 2, 3)


# --- Problems -----------------------------------------------------------------------------------------------------


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
    beginnings = (
        "model.base: fp32",
        "adapt.router: layer 9",
        "optimizer: over several ranks adafactor",
        "parallel.ep: 3",
    )
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
    "more stages than layers": (
        {"parallel": {"pp": 3}, "hardware": {"count": 3}},
        r"parallel\.pp: 3 stages and only 2",
    ),
    "heads that do not divide": ({"parallel": {"tp": 3}, "hardware": {"count": 3}}, r"parallel\.tp: 3 ranks cannot"),
    "packed attention that shall be split": (
        {"parallel": {"tp": 2}, "hardware": {"count": 2}},
        r"parallel\.tp: .*q_proj is packed",
    ),
    "a load that is not there": (
        {"parallel": {"fsdp": 2, "ep": 2, "load": "missing.json"}, "hardware": {"count": 2}},
        r"parallel\.load 'missing\.json'",
    ),
    "deepspeed and its own": (
        {"parallel": {"engine": "deepspeed", "fsdp": 2, "zero": 3}, "hardware": {"count": 2}},
        r"parallel\.engine: deepspeed and parallel\.zero 3",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, small_model: Path) -> None:
    sections, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        resolve(config_of(small_model, **sections), "cuda")


def test_router_losses_of_a_dense_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(**sizes).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="'llama' is a dense model without routers"):
        resolve(config_of(tmp_path, {"also": ["norm"]}, train={"router_z_loss": 0.1}), "cuda")


def test_a_base_is_kept_as_it_is_published_unless_another_is_asked_for() -> None:
    run: dict[str, Any] = {"model": {"path": "gpt-oss-20b", "attention": "eager"}, "adapt": {"router": "all"}}
    kept = resolve(RunConfig.model_validate(run), "cuda")
    assert kept.config.model.base == kept.model.config.base == "mxfp4"
    assert RunConfig.model_validate(yaml.safe_load(kept.config.to_yaml())).to_yaml() == kept.config.to_yaml()
    for changes in ({"base": "nf4"}, {"weights": "random"}):
        run["model"] |= changes
        other = resolve(RunConfig.model_validate(run), "cuda", like=kept)
        assert other.model.plain is kept.model.plain
        assert other.config.model.base == "nf4"


def test_a_checkpoint_in_a_format_that_is_not_read_is_refused_unless_its_weights_are_drawn(tmp_path: Path) -> None:
    config = toy_config("mixtral").to_dict() | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"already quantized \(gptq\).* or a bf16 checkpoint"):
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


def test_training_on_another_device_than_it_was_resolved_for(
    small_model: Path, small_data: Path, tmp_path: Path
) -> None:
    config = small.run_config(small_model, small_data, tmp_path / "run")
    with pytest.raises(UserError, match="resolved for cuda; resolve it for cpu"):
        train(resolve(config, "cuda"), device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="resolved for a GPU, and this machine has none; resolve it for cpu"):
            train(resolve(config, "cuda"))
