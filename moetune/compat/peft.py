"""PEFT: LoRA layers that compute in their input's dtype, not their factors'; routers; targets."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear


class LoraFactor(nn.Linear):
    """A low-rank factor whose weight is cast to the dtype of the input in forward."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.to(x.dtype))


class NoAdapters(dict[str, Any]):
    """For a model's `peft_config`, where PEFT puts the settings of adapters before it adds them: it takes none."""

    def __setitem__(self, name: str, settings: Any) -> None:
        raise ValueError(
            f"PEFT would add an adapter ({name}), which exports leave out; choose what trains in adapt: of the run "
            "file, without peft_config"
        )

    def update(self, settings: Any) -> None:  # type: ignore[override]
        self[", ".join(settings)] = settings


def refuse_to_merge_into_codes(remedy: str) -> None:
    """Make PEFT raise `ValueError`, which ends in `remedy`, where it would add factors to the codes of a weight."""
    stock = getattr(Linear.merge, "__wrapped__", Linear.merge)

    @wraps(stock)
    def merge(self: Any, *args: Any, **options: Any) -> None:
        layer = self.get_base_layer()
        if not layer.weight.is_floating_point():
            raise ValueError(f"PEFT cannot merge factors into {type(layer).__name__}, a quantized weight; {remedy}")
        stock(self, *args, **options)

    Linear.merge = merge  # type: ignore[method-assign]


_TARGETS = ("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern")


def is_targeted(settings: Mapping[str, Any], path: str) -> bool:
    """Return whether PEFT gives a linear layer, or a parameter of stacked experts, the factors that an adapter with
    these `settings` has for it; it ignores others. Raise `ValueError` for settings that PEFT refuses."""
    given = {key: settings[key] for key in _TARGETS if settings.get(key) is not None}
    if not given.keys() & {*_TARGETS[:2]} or given.get("target_modules") == "all-linear":
        return True
    if any(
        f".{path}{leaf}".endswith(f".{name}") for name in given.get("target_parameters", []) for leaf in ("", ".weight")
    ):
        return True  # a router that is a module of its own, not an nn.Linear, has a weight
    try:
        return bool(check_target_module_exists(LoraConfig(**given), path))
    except (TypeError, re.error) as error:
        raise ValueError(str(error)) from None


def targets_module(settings: Mapping[str, Any], path: str) -> bool:
    """Return whether `target_modules` name a module of experts, as vLLM's settings do: PEFT refuses that."""
    named = settings.get("target_modules")
    return bool(named) and named != "all-linear" and is_targeted({**settings, "target_parameters": None}, path)


AtOnce = Callable[[nn.Module, Tensor, LoraFactor, LoraFactor, float], Tensor | None]
"""Function of (base layer, input x, A, B, scale) that returns base(x) + scale·B(A(x)), or None if it cannot
compute this base layer."""


def compute_in_the_inputs_dtype(layer: Any, at_once: AtOnce) -> None:
    """Make a PEFT linear layer with the adapter "default" multiply in the dtype of its input, by a forward of its own.

    PEFT casts the input to the factors' dtype, in which it then scales and adds all rows of the output, and clones the
    output of a 4-bit layer. Its cast can be switched off (`cast_input_dtype_enabled`), but then the dtypes do not
    match. Here the factors, which must be plain `nn.Linear` (else `AssertionError`), become `LoraFactor`, and the scale
    is applied to A·x, which has only r columns. If gradients are enabled and there is no dropout,
    `at_once(base layer, x, A, B, scale)` computes base(x) + scale·B(A(x)) as a whole; it may return None to decline.
    """
    for factors in (layer.lora_A, layer.lora_B):
        assert type(factors["default"]) is nn.Linear
        factors["default"].__class__ = LoraFactor
    layer.forward = partial(_forward, layer, at_once)


def _forward(layer: Any, at_once: AtOnce, x: Tensor) -> Tensor:
    """Forward of a PEFT layer: base(x) + B(scale · A(dropout(x))), or base(x) if adapters are disabled or merged."""
    inside = layer._modules  # torch's lookup of a module as an attribute takes as long as a view
    base, scale = inside["base_layer"], layer.scaling["default"]
    if layer.disable_adapters or layer.merged:
        return base(x)
    A, B, dropout = [inside[name]._modules["default"] for name in ("lora_A", "lora_B", "lora_dropout")]
    out: Tensor | None = None
    if torch.is_grad_enabled() and isinstance(dropout, nn.Identity):
        out = at_once(base, x, A, B, scale)
    if out is None:
        out = base(x) + B(A(dropout(x)) * scale)  # not in place: under tensor parallelism either term may be a view
    return out


Merged = Callable[[nn.Module, Tensor, Tensor, Tensor, float], Tensor]
"""Function of (base layer, input, A, B, scale) that returns the output of a layer with the weight W + scale·B·A."""


def merge_in_forward(layer: Any, merged: Merged) -> None:
    """Make a PEFT linear layer with the adapter "default" run `merged` as its forward, with the weights of its factors;
    the scale is 0 while adapters are disabled."""
    layer.forward = partial(_forward_merged, layer, merged)


def _forward_merged(layer: Any, merged: Merged, x: Tensor) -> Tensor:
    A, B = (factors["default"].weight for factors in (layer.lora_A, layer.lora_B))
    return merged(layer.base_layer, x, A, B, 0.0 if layer.disable_adapters else layer.scaling["default"])


class ScaledFactor(nn.Linear):
    """A factor A that returns scale · A, in float32, to be multiplied with B instead of with an input."""

    def forward(self, scale: Any) -> Tensor:
        return self.weight.float() * scale


def add_to_the_weight(layer: Any) -> None:
    """Make a PEFT wrapper of a parameter [out, in], with the adapter "default", compute by a forward of its own.

    PEFT makes the parameter a parametrization in each forward pass, and undoes it. Here the wrapped module runs with
    W + scale · B·A, in the dtype of W, in the place of W. Both factors are called as modules, because FSDP2 gathers
    their weights then.
    """
    layer.lora_A["default"].__class__, layer.lora_B["default"].__class__ = ScaledFactor, LoraFactor
    layer.forward = partial(_forward_with_weight, layer)


def _forward_with_weight(layer: Any, *args: Any, **kwargs: Any) -> Any:
    base, name = layer.base_layer, layer.parameter_name
    if layer.disable_adapters or layer.merged:
        return base(*args, **kwargs)
    scaled = layer.lora_A["default"](layer.scaling["default"])
    weight = getattr(base, name)
    weight = (weight + layer.lora_B["default"](scaled.mT).mT).to(weight.dtype)
    return functional_call(base, {name: weight}, args, kwargs)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Switch off the adapters of all PEFT layers of a model within the `with` block."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
