"""The adapted model on fake tensors: shapes, dtypes and aliases without data.

The fake tensors are on the device `cpu` even if a prediction is for a GPU, because a CPU-only torch cannot
differentiate fake CUDA tensors. The predictor accounts for what differs on a GPU.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from moetune.adapt.attention import Capability
from moetune.adapt.build import Adapted, build
from moetune.compat.bitsandbytes import Linear4bit
from moetune.compat.fake_mode import add_missing_fakes
from moetune.compat.torch import HostModule
from moetune.compat.transformers import fix_rotary_length
from moetune.experts.host import mark_on_host
from moetune.formats.nf4 import Nf4
from moetune.parallel.distribute import distribute
from moetune.parallel.ranks import SINGLE_RANK, Ranks, local_tensor
from moetune.run.resolve import ResolvedRun


def build_fake(
    run: ResolvedRun, mode: FakeTensorMode, ranks: Ranks = SINGLE_RANK, capability: Capability | None = None
) -> Adapted:
    """Build the adapted model on the meta device with `build`, and replace every meta tensor by a fake one.

    `mode` creates the fake tensors; other arguments and errors are those of `build`. Several ranks need an initialized
    process group, for example torch's `fake` backend, which sends nothing.
    """
    add_missing_fakes()
    adapted = build(run, "meta", ranks=ranks, capability=capability)
    with mode:
        for module in adapted.model.modules():
            if isinstance(module, Linear4bit):
                module.weight = Nf4(run.config.model.double_quant).fake_weight(module.weight)
            fix_rotary_length(module)
        memo: dict[Tensor, Tensor] = {}
        for module in adapted.model.modules():
            tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
            for own in tables:
                for name, tensor in own.items():
                    if tensor is not None and tensor.is_meta:
                        own[name] = memo.setdefault(tensor, _fake(tensor))
                        if isinstance(module, HostModule) and name in module.names_on_host():
                            mark_on_host(own[name])
    distribute(adapted.model, adapted.structure, adapted.ranks)  # not in `mode`: device meshes are real tensors
    return adapted


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield every tensor of a model on this rank: parameters or local shards, buffers, states of 4-bit layers."""
    yield from (local_tensor(parameter) for parameter in model.parameters())
    yield from model.buffers()
    for module in model.modules():
        if isinstance(module, Linear4bit) and (state := getattr(module.weight, "quant_state", None)) is not None:
            yield from (state.absmax, state.code)
            if (nested := state.state2) is not None:
                yield from (state.offset, nested.absmax, nested.code)


def _fake(tensor: Tensor) -> Tensor:
    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
