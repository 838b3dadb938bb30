"""`read_structure`: a model's parameters, linear layers and expert layers, read from its modules.

Only shapes are read, so the model may be on the meta device. Dense models are supported as well.
"""

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from moetune.compat.qwen4_exp import choose_all_at_once
from moetune.compat.transformers import set_attention
from moetune.errors import UserError, one_line
from moetune.models.components import Component, Landmarks
from moetune.models.dry_run import count_lists, rope_problem
from moetune.models.moe import (
    MoeLayer,
    expert_parameters,
    find_router,
    is_experts,
    mark_experts,
    read_shape,
    read_top_k,
    unknown_experts,
)
from moetune.models.text import auto_class, drop_towers, dropped

_NEEDS_FIELD = {
    "q_lora_rank": "builds this type's queries in full rank, which are not those of the checkpoint",
    "swiglu_limit": "does not limit the experts' activations of this type, as those of the checkpoint were in training",
}
"""Part of a setting's name -> what transformers does in a type without such a field, as Ling 3's, whatever it says."""


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of a model as transformers builds it.

    `layer` is the index of its decoder layer, None outside of the layers. `has_gradient` is False if no gradient can
    reach it, because it is only used to choose tokens or experts by comparison.
    """

    name: str
    component: Component
    layer: int | None
    numel: int
    shape: tuple[int, ...]
    has_gradient: bool = True


class LinearInfo(NamedTuple):
    """One `nn.Linear` of a model as transformers builds it, or a router that multiplies by a weight of its own.

    `layer` is the index of its decoder layer, None outside of the layers. `has_gradient` is False if no gradient can
    reach the weight, so that LoRA has no effect.
    """

    in_features: int
    out_features: int
    component: Component
    layer: int | None
    has_gradient: bool = True


@dataclass(frozen=True)
class ModelStructure:
    """The structure of one model.

    Attributes:
        num_layers: number of decoder layers, with or without experts.
        moe_layers: the layers with routed experts, in order; empty for a dense model.
        parameters: every parameter once; a tied parameter under its first name.
        tied: second name of a tied parameter -> its first name.
        dropped: path of each module that text never reaches, such as a vision tower -> its number of parameters, which
            are in none of the above.
    """

    model_type: str
    num_layers: int
    moe_layers: tuple[MoeLayer, ...]
    parameters: tuple[ParameterInfo, ...]
    tied: Mapping[str, str]
    _linears: Mapping[str, LinearInfo] = field(repr=False)
    dropped: Mapping[str, int] = field(default_factory=dict)
    _routers: Mapping[str, LinearInfo] = field(default_factory=dict, repr=False)

    def parameters_of(self, component: str) -> tuple[ParameterInfo, ...]:
        """Return the parameters of one component, such as `attention`."""
        return tuple(parameter for parameter in self.parameters if parameter.component == component)

    def linears(self, component: Component | None = None) -> dict[str, LinearInfo]:
        """Return module path -> linear layer, for all components or only for `component`."""
        return {name: linear for name, linear in self._linears.items() if component in (None, linear.component)}

    def lora_layers(self) -> dict[str, LinearInfo]:
        """Return module path -> layer, for all that LoRA can be put on outside of experts: linear layers, and routers
        whose class is no `nn.Linear` but has a `weight` [experts, hidden] of its own."""
        return {**self._linears, **self._routers}

    def without(self, layers: Collection[int]) -> "ModelStructure":
        """Return the structure without the decoder layers with the indices `layers`; `num_layers` stays as it is."""
        return self.where(lambda name, layer: layer not in layers)

    def where(self, holds: Callable[[str, int | None], bool]) -> "ModelStructure":
        """Return the structure with the parameters for which `holds` is true, given name and decoder layer, and their
        layers with experts."""
        return replace(
            self,
            moe_layers=tuple(layer for layer in self.moe_layers if holds(layer.experts, layer.index)),
            parameters=tuple(parameter for parameter in self.parameters if holds(parameter.name, parameter.layer)),
            _linears={path: linear for path, linear in self._linears.items() if holds(f"{path}.weight", linear.layer)},
            _routers={path: router for path, router in self._routers.items() if holds(f"{path}.weight", router.layer)},
        )


def require_causal_lm(config: PretrainedConfig) -> None:
    """Raise `UserError` unless transformers has a model for this configuration that continues text."""
    if auto_class(config) is None:
        raise UserError(
            f"model type {config.model_type!r} is not a causal language model in transformers: neither "
            "AutoModelForCausalLM nor AutoModelForImageTextToText has one that reads text alone"
        )


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """Build a model on the meta device: parameters have shapes but no storage, which takes a fraction of a second.

    Of a model that takes images or audio too, what text never reaches is dropped (text.py).

    Raises:
        UserError: the configuration is not of a causal language model, or transformers cannot build the model.
    """
    require_causal_lm(config)
    name = config.model_type
    text = config.text_config if "text_config" in config.sub_configs else config
    for key, part in product(vars(text).keys() - type(text).__dataclass_fields__, _NEEDS_FIELD):
        value = getattr(text, key)
        if part in key and any(value if isinstance(value, list) else [value]):
            raise UserError(
                f"model type {name!r}: config.json has {key} {value}, and transformers {_NEEDS_FIELD[part]}"
            )
    if wrong := rope_problem(config, failed=False):
        raise UserError(f"model type {name!r}: config.json has {wrong}")
    config = copy.deepcopy(config)
    set_attention(config, "eager")  # config.json may name an implementation whose package is not installed here
    try:
        with torch.device("meta"):
            auto = auto_class(config)
            count_lists(config)
            model: PreTrainedModel = auto.from_config(config)
    except ImportError as error:
        raise UserError(f"model type {name!r} needs a package that is not installed: {one_line(error)}") from error
    except Exception as error:  # a wrong config can make model code raise any error
        why = rope_problem(config) or f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"transformers cannot build {name!r} from its configuration: {why}") from error
    if auto is AutoModelForImageTextToText:
        drop_towers(model)
    mark_experts(model)
    choose_all_at_once(model)
    return model


def read_structure(model: PreTrainedModel) -> ModelStructure:
    """Read the structure of a causal language model as transformers built it, before any adaptation.

    Raises:
        UserError: the model has experts without the flags of transformers (moe.py), or an MoE layer whose router or
            top_k is not found; it would be counted wrongly.
    """
    model_type = model.config.model_type
    unknown = unknown_experts(model)
    if unknown is not None:
        raise UserError(
            f"model type {model_type!r} is not supported: its experts ({unknown}) are neither among those that "
            "transformers marks with use_experts_implementation, nor do they compute the same"
        )
    moe_layers = _read_moe_layers(model)
    landmarks = Landmarks(model, _experts_and_routers(model, moe_layers))
    parameters = []
    for name, parameter in model.named_parameters():
        component, layer = landmarks.component_of(name), landmarks.layer_of(name)
        reached = parameter.requires_grad and not landmarks.is_chooser(name)
        parameters.append(ParameterInfo(name, component, layer, parameter.numel(), tuple(parameter.shape), reached))
    linears = {
        name: LinearInfo(
            module.in_features,
            module.out_features,
            landmarks.component_of(f"{name}.weight"),
            landmarks.layer_of(name),
            not landmarks.is_chooser(name),
        )
        for name, module in landmarks.modules.items()
        if isinstance(module, nn.Linear) and _is_one_product(module)
    }
    routers = {
        layer.router: LinearInfo(weight.shape[1], weight.shape[0], "router", layer.index)
        for layer in moe_layers
        if layer.router not in linears
        and isinstance(weight := getattr(landmarks.modules[layer.router], "weight", None), nn.Parameter)
        and weight.ndim == 2
    }
    return ModelStructure(
        model_type,
        landmarks.num_layers,
        moe_layers,
        tuple(parameters),
        tied_names(model),
        linears,
        dropped(model),
        routers,
    )


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Return second name of a tied parameter -> its first name."""
    first_names: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first for name, parameter in named if (first := first_names.setdefault(id(parameter), name)) != name}


def _read_moe_layers(model: PreTrainedModel) -> tuple[MoeLayer, ...]:
    model_type, landmarks = model.config.model_type, Landmarks(model)
    layers: dict[int, MoeLayer] = {}
    for path, module in landmarks.modules.items():
        if not is_experts(module):
            continue
        refusal = f"model type {model_type!r} is not supported: {path}"
        shape = read_shape(module, refusal)
        block, index = path.rpartition(".")[0], landmarks.layer_of(path)
        if index is None or index in layers:
            raise UserError(f"{refusal} is not the one set of experts of a decoder layer")
        router = find_router(model, block, shape.num_experts)
        if router is None:
            raise UserError(f"{refusal} has no router beside it")
        top_k = read_top_k(model, router, block, index)
        if top_k is None:
            raise UserError(
                f"model type {model_type!r}: neither {router} nor the configuration says how many experts a "
                "token uses; set num_experts_per_tok in config.json"
            )
        if top_k > shape.num_experts:
            raise UserError(
                f"model type {model_type!r}: a token uses {top_k} experts (num_experts_per_tok in config.json), and "
                f"{path} has {shape.num_experts}"
            )
        if model_type == "phimoe" and top_k != 2:  # findings/transformers_routing_settings_ignored.sh
            raise UserError(f"model type 'phimoe' computes 2 experts a token; set num_experts_per_tok {top_k} to 2")
        _refuse_groups(model.get_submodule(router), top_k, shape.num_experts, f"model type {model_type!r}, {path}")
        layers[index] = MoeLayer(index, block, path, router, top_k, shape)
    return tuple(layers[index] for index in sorted(layers))


def _experts_and_routers(model: PreTrainedModel, moe_layers: tuple[MoeLayer, ...]) -> dict[str, Component]:
    """Return parameter name -> component, for the parameters of experts and routers.

    A parameter of the block itself whose last axis has one value per expert counts as the router's.
    """
    marked: dict[str, Component] = {}
    for layer in moe_layers:
        for key in expert_parameters(model.get_submodule(layer.experts)):
            marked[f"{layer.experts}.{key}"] = "experts"
        for key, _ in model.get_submodule(layer.router).named_parameters():
            marked[f"{layer.router}.{key}"] = "router"
        for key, parameter in model.get_submodule(layer.block).named_parameters(recurse=False):
            if parameter.shape[-1:] == (layer.shape.num_experts,):
                marked[f"{layer.block}.{key}"] = "router"
    return marked


def _refuse_groups(router: nn.Module, top_k: int, experts: int, where: str) -> None:
    """Raise `UserError` unless a router that chooses groups of experts first has equal groups, with enough experts."""
    groups, kept = (getattr(router, name, None) for name in ("num_group", "topk_group"))
    if not groups or kept is None:
        return
    settings = f"n_group {groups}, topk_group {kept}, num_experts_per_tok {top_k}, and {experts} experts"
    if groups < 0 or experts % groups:
        raise UserError(f"{where}: {settings} do not divide into {groups} groups; correct n_group in config.json")
    if not top_k <= kept * (experts // groups) <= experts:
        raise UserError(
            f"{where}: {settings}: a token chooses among the {experts // groups} experts of each of {kept} groups; "
            "correct topk_group in config.json"
        )


def _is_one_product(linear: nn.Linear) -> bool:
    """Return whether a linear layer is a single matrix product from in_features to out_features.

    The counterexample is DeepSeek-V4's `o_a_proj`, which has a separate product for each group of heads.
    """
    if type(linear).forward is nn.Linear.forward:
        return True
    try:
        with torch.no_grad():
            x = linear.weight.new_empty(2, 3, linear.in_features, device="meta")
            out = copy.deepcopy(linear).to("meta")(x)
    except RuntimeError:
        return False
    return isinstance(out, torch.Tensor) and out.shape == (2, 3, linear.out_features)
