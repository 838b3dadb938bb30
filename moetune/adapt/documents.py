"""Packed documents kept apart in layers with a state: Mamba, linear attention, convolutions.

Attention hides one document from another by a mask or by `cu_seqlens`. A module with a state takes no mask, so it runs
on each document alone, one after the other, and the state begins anew with each: exact, and slower the more documents a
row has. Where a package's kernel scans the sequence and takes `cu_seqlens` (flash-linear-attention), the module runs on
all documents at once, and only its convolution on one after the other. Such modules are found by what their code does,
not by a model's name.

The lengths of the documents are part of the batch. They reach each decoder layer as a keyword argument, which
activation checkpointing keeps, so that a layer recomputes what it computed.

Shapes: B rows of S tokens each.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from moetune.compat.transformers import carries_state, convolutions_of, scans_of
from moetune.models.stack import decoder_layers

DOCUMENT_LENGTHS = "document_lengths"
"""Name of the keyword argument with which a batch gives a model the lengths of its documents."""
_OF_PACKING = frozenset((DOCUMENT_LENGTHS, "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"))


class _Current:
    """Lengths of the documents in the batch that a decoder layer is running on; None outside, or if not packed."""

    lengths: Sequence[int] | None = None
    _known: tuple[Any, Tensor, Tensor] | None = None

    def offsets(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the first token of each document, and the number of all, int64, on `device` and on the host.

        All layers get the same tensors, so that they are copied once, and a package derives from them what it needs
        once.
        """
        if self._known is None or self._known[0] != (self.lengths, device):
            assert self.lengths is not None
            on_host = torch.tensor([0, *accumulate(self.lengths)])
            self._known = (self.lengths, device), on_host.to(device), on_host
        return self._known[1:]


class _Layer(nn.Module):
    """Base class of decoder layers with a state: sets the documents' lengths in `current` while the layer runs.

    It is a class because transformers checkpoints the forward method of the class: a recomputed layer must know them.
    """

    current: _Current

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        current, before = self.current, self.current.lengths
        current.lengths = kwargs.get(DOCUMENT_LENGTHS, before)  # a layer may contain another, which is not given them
        try:
            return super().forward(*args, **kwargs)
        finally:  # recomputing may end with an exception
            current.lengths = before


@cache
def _joined_class(base: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (base, kind), {})


def put_before(base: type[nn.Module], module: nn.Module) -> None:
    """Make `base` a base class of a module that precedes its own class, in place."""
    module.__class__ = _joined_class(base, type(module))  # type: ignore[arg-type]  # a class is hashable


def split_by_documents(model: nn.Module) -> None:
    """Make every module of a decoder layer that carries a state run on each packed document alone, in place."""
    current = _Current()
    for layer in decoder_layers(model).values():
        if modules := modules_with_state(layer):
            put_before(_Layer, layer)
            vars(layer)["current"] = current
            for module in modules:
                module.forward = partial(_forward, current, module)


def layers_with_state(model: nn.Module) -> int:
    """Return how many decoder layers have modules that carry a state."""
    return sum(bool(modules_with_state(layer)) for layer in decoder_layers(model).values())


def is_split_by_documents(layer: nn.Module) -> bool:
    """Return whether `split_by_documents` found modules with a state in a decoder layer."""
    return isinstance(layer, _Layer)


def document_lengths(lengths: Sequence[int]) -> dict[str, Any]:
    """Return the keyword argument that tells a model that is split by documents their lengths.

    `lengths` are in tokens, row by row. They stay integers, so that the host need not wait for the device.
    """
    return {DOCUMENT_LENGTHS: tuple(lengths)}


def modules_with_state(layer: nn.Module) -> list[nn.Module]:
    """Return the outermost modules within a decoder layer that carry a state."""
    modules: list[nn.Module] = []
    for child in layer.children():
        modules += [child] if carries_state(child) else modules_with_state(child)
    return modules


def _forward(current: _Current, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Forward method of a module with a state: run it on packed documents as on each alone, and join the outputs."""
    forward, lengths = partial(type(module).forward, module), current.lengths
    kwargs = {name: value for name, value in kwargs.items() if name not in _OF_PACKING}
    first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    rows, tokens = first.shape[:2]
    if lengths is None or len(lengths) == rows:
        return forward(*args, **kwargs)
    at_once = _takes_documents(module)
    pieces = [rows * tokens] if at_once else [*lengths]

    def of_each(value: Any) -> Sequence[Any]:
        if isinstance(value, Tensor) and value.shape[:2] == (rows, tokens):
            return value.reshape(1, rows * tokens, *value.shape[2:]).split(pieces, 1)
        return [value] * len(pieces)

    positional, named = zip(*map(of_each, args), strict=True), {name: of_each(kwargs[name]) for name in kwargs}
    with _separating(module, lengths, *current.offsets(first.device)) if at_once else nullcontext():
        outputs = [
            forward(*given, **{name: values[index] for name, values in named.items()})
            for index, given in enumerate(positional if args else [()] * len(pieces))
        ]
    if isinstance(outputs[0], Tensor):
        return _joined(outputs, pieces, rows)
    return tuple(_joined(parts, pieces, rows) for parts in zip(*outputs, strict=True))


def _takes_documents(module: nn.Module) -> bool:
    """Return whether a package's kernels would now scan the sequence, and keep documents apart."""
    scans = scans_of(module)
    return bool(scans) and all(scan.takes_documents() for scan in scans)


@contextmanager
def _separating(module: nn.Module, lengths: Sequence[int], offsets: Tensor, on_host: Tensor) -> Iterator[None]:
    """Let a module's scans and convolutions keep the documents of its only row apart within the `with` block."""
    apart = {"cu_seqlens": offsets, "cu_seqlens_cpu": on_host}  # transformers' wrapper leaves out what is not taken

    def scan(now: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return now(*args, **(kwargs | apart))

    def convolve(now: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.cat([now(part, *args, **kwargs) for part in hidden.split([*lengths], 2)], 2)

    with ExitStack() as stack:
        for operations, change in ((scans_of(module), scan), (convolutions_of(module), convolve)):
            for operation in operations:
                stack.enter_context(operation.changed(partial(partial, change)))
        yield


def _joined(parts: Sequence[Any], lengths: Sequence[int], rows: int) -> Any:
    """Join the documents' outputs [1, length, …] to one [B, S, …], for B = `rows`.

    Of an output without a row for each token, such as a final state, return the last document's.
    """
    if not all(isinstance(part, Tensor) and part.shape[1] == n for part, n in zip(parts, lengths, strict=True)):
        return parts[-1]
    return torch.cat([*parts], 1).unflatten(1, (rows, -1)).squeeze(0)
