"""A run resolved: made once, with what it says of its model."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from moetune.adapt.build import build
from moetune.config.schema import PARTS, RunConfig
from moetune.errors import UserError
from moetune.models.source import find_model_source
from moetune.models.structure import meta_model, read_structure
from moetune.run.resolve import resolve
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


def test_a_training_start_resolves_once(configure: small.Configure, monkeypatch: pytest.MonkeyPatch) -> None:
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
    config = configure("experts", train={"steps": 1})
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
    assert resolve(config_of(small_model, EVERYTHING), "cuda").optimizers.keys() == {*PARTS}
    both = {"router": {"name": "sgd"}, "lora": {"name": "adamw"}}
    adapt = {"router": "0", "lora": EVERYTHING["lora"]}
    assert resolve(config_of(small_model, adapt, optimizer=both), "cuda").optimizers["router"].name == "sgd"


def test_a_base_is_kept_as_it_is_published_unless_another_is_asked_for() -> None:
    run: dict[str, Any] = {"model": {"path": "gpt-oss-20b"}, "adapt": {"router": "all"}}
    kept = resolve(RunConfig.model_validate(run), "cuda")
    assert kept.config.model.base == kept.model.config.base == "mxfp4"
    assert RunConfig.model_validate(yaml.safe_load(kept.config.to_yaml())).to_yaml() == kept.config.to_yaml()
    for changes in ({"base": "nf4"}, {"weights": "random"}):
        run["model"] |= changes
        other = resolve(RunConfig.model_validate(run), "cuda", like=kept)
        assert other.model.plain is kept.model.plain
        assert other.config.model.base == "nf4"


def test_training_on_another_device_than_it_was_resolved_for(configure: small.Configure) -> None:
    config = configure()
    with pytest.raises(UserError, match="resolved for cuda; resolve it for cpu"):
        train(resolve(config, "cuda"), device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="resolved for a GPU, and this machine has none; resolve it for cpu"):
            train(resolve(config, "cuda"))


def test_the_last_layers_with_experts_keep_their_rows(tmp_path: Path) -> None:
    toy_config("deepseek_v3", num_hidden_layers=4).save_pretrained(tmp_path)  # whose first layer has no router
    sections = {"model": {"dtype": "fp32"}}

    def keeping(**train: Any) -> frozenset[int]:
        return resolve(config_of(tmp_path, train=train, **sections), "cpu").keeps_rows

    assert keeping() == frozenset()
    assert keeping(keep_rows=2) == keeping(keep_rows=2, checkpointing="experts_only") == {2, 3}
    assert keeping(checkpointing="none") == keeping(keep_rows=3) == {1, 2, 3}
