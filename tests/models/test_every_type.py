"""Every causal language model of the installed transformers is read right, or refused by name."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moetune.errors import UserError
from moetune.models.dry_run import dry_run
from moetune.models.moe import is_experts
from moetune.models.parameter_count import count_parameters
from moetune.models.source import find_model_source
from moetune.models.structure import MoeLayer, meta_model, read_structure
from moetune.models.text import auto_class
from tests.thinned import thinned
from tests.toys import VOCAB, causal_lm_types, expert_model_types, marked_types, toy_config, toy_model

UNMARKED = "neither among those that transformers marks"
UNBUILDABLE = "cannot build"
REFUSED = {
    "dbrx": UNMARKED,
    "jetmoe": UNMARKED,
    "longcat_flash": UNMARKED,
    # Draft models: every layer reads the cache of the model they draft for, so they do not stand alone.
    "gemma4_assistant": "is not valid",
    "gemma4_unified_assistant": "cannot (build|run)",
    "emu3": UNBUILDABLE,  # a default configuration lacks the vocabulary map of its images
    # Their configuration joins text encoder, audio codec and decoder; the decoder wants its own.
    "musicgen": UNBUILDABLE,
    "musicgen_melody": UNBUILDABLE,
}
if importlib.util.find_spec("timm") is None:
    REFUSED["gemma3n"] = "needs a package that is not installed"
READ = [name for name in causal_lm_types() if name not in REFUSED]


@pytest.mark.one_in(12)
@pytest.mark.parametrize("model_type", thinned(READ, 3, expert_model_types()))
def test_every_parameter_is_counted_once_and_every_marked_module_is_found(model_type: str) -> None:
    model = meta_model(toy_config(model_type))
    structure = read_structure(model)
    assert sum(part.numel for part in structure.parameters) == sum(p.numel() for p in model.parameters())
    marked = [name for name, module in model.named_modules() if is_experts(module)]
    assert [layer.experts for layer in structure.moe_layers] == marked
    assert bool(marked) == (model_type in (*expert_model_types(), "llama4", "llama4_text"))
    for layer in structure.moe_layers:
        experts = [part.numel for part in structure.parameters_of("experts") if part.layer == layer.index]
        assert sum(experts) == layer.shape.num_experts * layer.shape.parameters_per_expert
        assert any(part.name.startswith(layer.router + ".") for part in structure.parameters_of("router"))
    parameter_count = count_parameters(structure)
    assert sum(parameter_count.components.values()) == parameter_count.total
    assert sum(parameter_count.active.values()) == parameter_count.active_per_token


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model_type", thinned(name for name in expert_model_types() if name not in REFUSED))
def test_top_k_and_expert_width_agree_with_a_real_forward_pass(model_type: str) -> None:
    model = toy_model(model_type)
    layers = read_structure(model).moe_layers
    seen: dict[int, tuple[int, int]] = {}

    def watch(layer: MoeLayer) -> None:
        def before(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            hidden, ids, *_ = (*args, *kwargs.values())
            seen[layer.index] = (hidden.shape[-1], ids.shape[-1])

        model.get_submodule(layer.experts).register_forward_pre_hook(before, with_kwargs=True)

    for layer in layers:
        watch(layer)
    with torch.no_grad():
        model(input_ids=torch.randint(3, VOCAB, (2, 16)), use_cache=False)
    assert seen == {layer.index: (layer.shape.hidden, layer.top_k) for layer in layers}


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_what_cannot_be_handled_is_refused_by_name(model_type: str, tmp_path: Path) -> None:
    reason = REFUSED[model_type]
    config = {"model_type": model_type} if reason != UNMARKED else toy_config(model_type).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))

    def read() -> None:
        read_structure(model := meta_model(find_model_source(str(tmp_path)).config))
        dry_run(model)

    with pytest.raises(UserError, match=reason) as caught:
        read()
    if reason != "is not valid":
        assert model_type in str(caught.value)


def test_a_mixture_of_experts_that_is_no_causal_language_model_is_refused() -> None:
    marked = [config for name in marked_types() if auto_class(config := CONFIG_MAPPING[name]()) is None]
    for config in (CONFIG_MAPPING["nllb-moe"](), CONFIG_MAPPING["switch_transformers"](), *marked):
        with pytest.raises(UserError, match=f"{config.model_type!r} is not a causal language model"):
            meta_model(config)


def test_the_sweep_is_not_empty() -> None:
    assert len(READ) > 170
    assert len(expert_model_types()) > 50
