"""Scans and hyper-connections in transformers' own code, recomputed in backward.

A scan carries a state along a sequence. Without the package of its kernel (flash-linear-attention, mamba-ssm),
transformers computes it in torch, chunk by chunk, and autograd keeps every intermediate result in float32: many times
what goes in. A hyper-connection mixes the streams of a residual; autograd keeps several float32 copies of all streams,
and each iteration of a Sinkhorn-Knopp projection. Here both keep their inputs alone and are computed once more in
backward.

Both allocate the same storages in the same order whenever their inputs have the same shapes. So a trace need not run
each: it takes the place of `runner.run`.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from moetune.adapt.documents import modules_with_state, put_before
from moetune.compat.transformers import is_hyper_connection, scans_of
from moetune.kernels.runner import Outputs, runner
from moetune.models.stack import decoder_layers


class _Scanning(nn.Module):
    """Base class of modules whose scans, where transformers' own code computes them, keep only their inputs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for scan in scans_of(self):
                if scan.is_in_torch():  # a package's kernels stay: they have a backward of their own
                    stack.enter_context(scan.changed(_recomputed))
            return super().forward(*args, **kwargs)


class _Mixing(nn.Module):
    """Base class of hyper-connections that keep only their inputs and weights."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def mixed(weights: dict[str, Tensor], settings: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
            with patch.dict(self._parameters, weights):
                return super(_Mixing, self).forward(*args, **kwargs)

        settings = type(self), *(value for value in vars(self).values() if isinstance(value, (int, float)))
        return _recomputed(mixed)(dict(self._parameters), settings, *args, **kwargs)


def recompute_scans(model: nn.Module) -> None:
    """Let the scans and hyper-connections of all decoder layers keep only their inputs for backward, in place."""
    for layer in decoder_layers(model).values():
        for module in modules_with_state(layer):
            if scans_of(module) and not isinstance(module, _Scanning):
                put_before(_Scanning, module)
        for module in layer.modules():
            if is_hyper_connection(module) and not isinstance(module, _Mixing):
                put_before(_Mixing, module)


def _recomputed(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does what `operation` does, and keeps only its tensor arguments for backward."""

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

        def outputs_of(tensors: Sequence[Tensor]) -> Outputs:
            values = list(rest)
            for index, tensor in zip(indices, tensors, strict=True):
                values[index] = tensor
            args, kwargs = tree_unflatten(values, form)
            results = operation(*args, **kwargs)
            return [_alone(output) for output in ((results,) if isinstance(results, Tensor) else results)]

        key = operation.__module__, operation.__qualname__, form, tuple((type(value), value) for value in rest)
        outputs = _Recomputed.apply(outputs_of, key, *(leaves[index] for index in indices))
        return outputs[0] if len(outputs) == 1 else outputs

    return run


def _alone(output: Tensor | None) -> Tensor | None:
    """Return a tensor in a storage of its own size: scans cut off what they have padded, which would stay."""
    return output.clone() if output is not None and output.untyped_storage().nbytes() > output.nbytes else output


class _Recomputed(torch.autograd.Function):
    """Applies a function to tensors, and applies it once more in backward to find its gradients."""

    @staticmethod
    def forward(
        context: Any, function: Callable[[Sequence[Tensor]], Outputs], key: Hashable, *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        context.function, context.key = function, key
        context.save_for_backward(*tensors)
        return tuple(runner.run((key, "forward"), function, tensors))

    @staticmethod
    def backward(context: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        function, tensors = context.function, context.saved_tensors
        needed = tuple(tensor.requires_grad for tensor in tensors)
        given = tuple(gradient is not None for gradient in gradients)

        def differentiated(values: Sequence[Tensor]) -> Outputs:
            inputs = [
                value.detach().requires_grad_(is_needed)
                for value, is_needed in zip(values[: len(tensors)], needed, strict=True)
            ]
            with torch.enable_grad():
                outputs = [out for out, is_given in zip(function(inputs), given, strict=True) if is_given]
            return torch.autograd.grad(
                [out for out in outputs if out is not None],
                [value for value in inputs if value.requires_grad],
                values[len(tensors) :],
                allow_unused=True,
            )

        computed = runner.run(
            (context.key, "backward", needed, given),
            differentiated,
            [*tensors, *(gradient for gradient in gradients if gradient is not None)],
        )
        left = iter(computed)
        return None, None, *(next(left) if is_needed else None for is_needed in needed)
