"""Packages' kernels of linear attention and Mamba, compared with transformers' code before training.

A package may be installed and still not work here: with some versions of Triton, flash-linear-attention refuses the
backward pass on Hopper, after a forward pass that ran. A module whose kernels raise or differ runs transformers' own
code, which is exact, and slower.
"""

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from moetune.adapt.documents import modules_with_state
from moetune.compat.transformers import Operation, scans_of, without_packages
from moetune.models.stack import decoder_layers

_TOKENS = 150
"""Tokens of the comparison: more than two chunks of a scan, the last one not full."""
_TOLERANCE = 0.05
"""Of the norm of the output and of the input's gradient, in 16 bits. Sums are in another order."""


def leave_out_broken_packages(model: nn.Module, dtype: torch.dtype) -> None:
    """Let transformers' own code run, in this process, in place of packages' scans that do not do the same here.

    Each is tried in one module of each kind that calls it, forward and backward, on random hidden states of `dtype`.
    Warns of each that is left out, and why.
    """
    tried = set[tuple[type, ...]]()
    for layer in decoder_layers(model).values():
        for module in modules_with_state(layer):
            kernels = [scan for scan in scans_of(module) if scan.is_kernel()]
            if not kernels or type(module).__mro__ in tried:
                continue
            tried.add(type(module).__mro__)
            if (reason := _difference(model, module, dtype)) is not None:
                _leave_out(kernels, reason)


def _difference(model: nn.Module, module: nn.Module, dtype: torch.dtype) -> str | None:
    """Return why a module's packages cannot be used; None if they can, or if it takes more than hidden states."""
    generator, device = torch.Generator().manual_seed(0), next(module.parameters()).device
    size: int = model.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
    hidden, gradient = torch.randn(2, 1, _TOKENS, size, generator=generator).to(device, dtype)
    try:
        with without_packages(model):
            expected = _run(module, hidden, gradient)
    except Exception:  # a module that wants more than hidden states: the first step will show
        return None
    try:
        computed = _run(module, hidden, gradient)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    off = max(
        float((by_package - by_torch).norm() / by_torch.norm().clamp(min=torch.finfo(torch.float32).tiny))
        for by_package, by_torch in zip(computed, expected, strict=True)
    )
    return None if off < _TOLERANCE else f"results differ by {off:.1%}"


def _run(module: nn.Module, hidden: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return a module's output for hidden states [1, tokens, hidden], and their gradient, in float32."""
    given = hidden.clone().requires_grad_()
    with torch.enable_grad():
        result = module(given)
        out = result if isinstance(result, Tensor) else result[0]
        (dhidden,) = torch.autograd.grad(out, given, gradient)
    return out.detach().float(), dhidden.float()


def _leave_out(kernels: Iterable[Operation], reason: str) -> None:
    for kernel in kernels:
        kernel.leave_out()
        warnings.warn(
            f"{kernel.package}: its {kernel.kernel} does not work here ({reason}); transformers' own code takes its "
            "place, which is exact, and slower",
            stacklevel=3,
        )
