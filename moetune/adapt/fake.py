"""The adapted model on fake tensors: every shape, dtype and alias of the real one, no data.

Fake tensors live on the `cpu` device, whatever the device that is predicted: a CPU-only torch cannot differentiate fake
CUDA tensors. The device is a label; what CUDA adds is added by who predicts for it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from moetune.adapt.build import Adapted, build
from moetune.config import RunConfig
from moetune.experts.host import mark_on_host
from moetune.experts.packed import BLOCK, NESTED_BLOCK, PackedStack
from moetune.parallel.distribute import distribute
from moetune.parallel.ranks import ALONE, Ranks, here

_BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings that choose frequencies by the largest position, a value, which fake tensors do not have."""


_FAKES = torch.library.Library("aten", "IMPL")
for _overload in ("_fused_sgd_", "_fused_sgd_.tensor_lr"):
    # torch has none: it would run the kernel on real zeros, of the size of everything that trains.
    _FAKES.impl(_overload, lambda *args, **kwargs: None, "Meta")


def build_fake(config: RunConfig, mode: FakeTensorMode, ranks: Ranks = ALONE) -> Adapted:
    """Builds on the meta device by the one path, then gives every tensor a fake storage. `mode` need not be active.

    One of several `ranks` needs torch.distributed to know of them: a backend that sends nothing will do.

    Raises:
        UserError: as `build`.
    """
    adapted = build(config, "meta", ranks=ranks)
    with mode:
        for module in adapted.model.modules():
            if isinstance(module, Linear4bit):
                module.weight = _packed(module.weight, config.model.double_quant)
            if getattr(module, "rope_type", None) in _BY_LENGTH:
                _never_ask_for_the_length(module)
        memo: dict[Tensor, Tensor] = {}
        for module in adapted.model.modules():
            for own in (module._parameters, module._buffers):
                for name, tensor in own.items():
                    if tensor is not None and tensor.is_meta:
                        own[name] = memo.setdefault(tensor, _fake(tensor))
                        if isinstance(module, PackedStack) and module.on_host:
                            mark_on_host(own[name])
    distribute(adapted.model, adapted.anatomy, adapted.selection, adapted.ranks)  # meshes are real tensors
    return adapted


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Every tensor that a model holds on this rank: parameters, buffers, and the constants of 4-bit linear layers."""
    yield from (here(parameter) for parameter in model.parameters())
    yield from model.buffers()
    for module in model.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None) if _is_4bit(module) else None
        if state is not None:
            nested = state.state2
            yield from (state.absmax, state.code)
            if nested is not None:
                yield from (state.offset, nested.absmax, nested.code)


def _never_ask_for_the_length(rotary: Any) -> None:
    """Whichever frequencies are chosen, they have the same size; a `default` embedding does not choose. Phimoe's reads
    its configuration too, which the model goes on using: this module gets a copy."""
    rotary.rope_type = "default"
    rotary.config = copy.copy(rotary.config)
    rotary.config.rope_parameters = {**rotary.config.rope_parameters, "rope_type": "default"}


def _is_4bit(module: nn.Module) -> bool:
    return isinstance(module, Linear4bit)


def _fake(tensor: Tensor) -> Tensor:
    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _packed(weight: Tensor, double_quant: bool) -> nn.Parameter:
    """A 4-bit weight as bitsandbytes stores it, as a plain Parameter that carries its quantization state."""
    blocks = -(-weight.numel() // BLOCK)
    state = QuantState(
        absmax=torch.empty(blocks, dtype=torch.uint8 if double_quant else torch.float32),
        shape=weight.shape,
        code=torch.empty(16),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=weight.dtype,
    )
    if double_quant:
        nested = QuantState(
            absmax=torch.empty(-(-blocks // NESTED_BLOCK)), code=torch.empty(256), blocksize=NESTED_BLOCK,
            dtype=torch.float32,
        )  # fmt: skip
        state.offset, state.state2, state.nested = torch.empty(()), nested, True
    packed = nn.Parameter(torch.empty((-(-weight.numel() // 2), 1), dtype=torch.uint8), requires_grad=False)
    packed.quant_state = state
    return packed
