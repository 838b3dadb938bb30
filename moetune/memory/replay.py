"""Layers of one kind take the same memory in the same order: trace two of them, replay the others.

Of the layers that are alike, the first and the last run for real. The others become stand-ins that hold the layer's
parameters, make its output and the gradients of its parameters for real, and note the births and deaths that a pass
before the trace recorded for a real one. Between two layers of a kind, what is alive grows or falls by the same amount
from each to the next, so a peak is at one of the ends, where nothing is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moetune.anatomy.stack import decoder_layers
from moetune.memory.tracker import Tracker
from moetune.step.fused import FusedBackward

Entry = tuple[int, int, str, bool]


@dataclass
class Recording:
    """What one real layer did: its part of the log in forward and in backward, by position of birth.

    An entry (position, bytes, op, on_host) is a birth, (position, -1, "", False) a death. `keeps_input` says whether
    the layer's input stays alive for backward; `logits` what its router shows of itself, shape and dtype, if losses
    are computed of it. What was fetched from the host is left out: it is the same for neighbours that are alike, and
    the copies that a real layer has fetched stand until the next real one asks for its own.
    """

    forward: list[Entry] = field(default_factory=list)
    backward: list[Entry] = field(default_factory=list)
    keeps_input: bool = False
    logits: tuple[torch.Size, torch.dtype] | None = None


class StandIn(nn.Module):
    """In place of a layer; anything that a model asks of the layer but to run is answered by the layer itself."""

    def __init__(self, layer: nn.Module, path: str, tracker: Tracker) -> None:
        super().__init__()
        self.path, self.recording, self.tracker = path, Recording(), tracker
        self.trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        self.show: Callable[[Tensor], None] | None = None  # where the router's logits go
        self.fused: FusedBackward | None = None
        object.__setattr__(self, "_layer", layer)  # not a submodule

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output, logits = _Replay.apply(self, hidden_states, *self.trained)
        if logits is not None and self.show is not None:
            self.show(logits)
        return output


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, stand_in, hidden_states, *trained):
        ctx.stand_in, ctx.blocks = stand_in, {}
        tracker = stand_in.tracker
        tracker.enter("forward", stand_in.path)
        _play(stand_in.recording.forward, ctx.blocks, tracker)
        if not any(ctx.needs_input_grad):
            _end(ctx.blocks, tracker)
        elif stand_in.recording.keeps_input:
            ctx.save_for_backward(hidden_states)
        shown = stand_in.recording.logits
        logits = None if shown is None else torch.empty(shown[0], dtype=shown[1])
        return torch.empty_like(hidden_states), logits

    @staticmethod
    def backward(ctx, gradient, *of_logits):
        tracker = ctx.stand_in.tracker
        tracker.enter("backward", ctx.stand_in.path)
        _play(ctx.stand_in.recording.backward, ctx.blocks, tracker)
        _end(ctx.blocks, tracker)
        gradients = [_gradient(ctx.stand_in, parameter) for parameter in ctx.stand_in.trained]
        return None, torch.empty_like(gradient) if ctx.needs_input_grad[1] else None, *gradients


def _gradient(stand_in: StandIn, parameter: nn.Parameter) -> Tensor | None:
    """A gradient to hand on; None where it is used up as it comes."""
    if stand_in.fused is not None and parameter in stand_in.fused.updaters:
        stand_in.fused.take(parameter, torch.empty_like(parameter))
        return None
    return torch.empty_like(parameter)


def _play(entries: list[Entry], blocks: dict[int, int], tracker: Tracker) -> None:
    for position, size, op, on_host in entries:
        if size >= 0:
            blocks[position] = tracker.birth(size, "transient_peak", op, on_host=on_host)
        elif position in blocks:
            tracker.death(blocks.pop(position))


def _end(blocks: dict[int, int], tracker: Tracker) -> None:
    for block in blocks.values():
        tracker.death(block)
    blocks.clear()


# --- Which layers are alike -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alike:
    """The layers of one kind, in order, with a stand-in for each."""

    layers: tuple[nn.Module, ...]
    stand_ins: tuple[StandIn, ...]

    def replace(self, model: nn.Module, *, ends: bool) -> None:
        """Puts stand-ins in place of the layers; real are then the first and the last, or with `ends` none."""
        last = len(self.layers) - 1
        for number, (layer, stand_in) in enumerate(zip(self.layers, self.stand_ins, strict=True)):
            is_real = number in (0, last) and not ends
            model.set_submodule(stand_in.path, layer if is_real else stand_in)

    def play(self, recording: Recording, tracker: Tracker) -> None:
        """What the stand-ins note from now on, and where."""
        for stand_in in self.stand_ins:
            stand_in.recording, stand_in.tracker = recording, tracker


def find_alike(model: nn.Module, gradients_arrive: bool, tracker: Tracker) -> list[Alike]:
    """The kinds of which there are more than two layers; their stand-ins have no recording yet.

    Args:
        gradients_arrive: whether something trains before the first layer, so that all must pass gradients on.
    """
    kinds: dict[tuple, dict[str, nn.Module]] = {}
    for path, layer in decoder_layers(model).items():
        kinds.setdefault((gradients_arrive, *_kind(layer)), {})[path] = layer
        gradients_arrive = gradients_arrive or any(parameter.requires_grad for parameter in layer.parameters())
    return [
        Alike(tuple(layers.values()), tuple(StandIn(layer, path, tracker) for path, layer in layers.items()))
        for layers in kinds.values()
        if len(layers) > 2
    ]


_NUMBERS = ("layer_idx", "layer_index", "layer_id", "block_idx", "layer_number", "depth")


def _kind(layer: nn.Module) -> tuple:
    """Classes, tensors and plain settings of a layer and everything in it, its number left out."""
    parts: list[Any] = []
    for path, module in layer.named_modules():
        settings = tuple(
            (name, value)
            for name, value in sorted(vars(module).items())
            if isinstance(value, (bool, int, float, str, type(None))) and name not in _NUMBERS
        )
        tensors = tuple(
            (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            for own in (module._parameters, module._buffers)
            for name, tensor in own.items()
            if tensor is not None
        )
        parts.append((path, type(module), settings, tensors))
    return tuple(parts)


# --- Recording ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """A router's logits, without the tensor: it must die when it would."""

    block: int | None
    shape: torch.Size
    dtype: torch.dtype


@dataclass
class _Watched:
    """The log's places where a layer's forward and backward begin and end, and its boundary tensors."""

    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    input: int | None = None
    output: int | None = None


@contextmanager
def recording(layers: list[nn.Module], tracker: Tracker, shown: list[Shown | None]) -> Iterator[list[Recording]]:
    """Records what each of these layers does in the one pass that runs inside; filled in when it ends. `shown` is what
    each layer's router has shown of itself by then."""
    seen = [_Watched() for _ in layers]
    recordings = [Recording() for _ in layers]
    hooks = []

    def watch(layer: nn.Module, watched: _Watched) -> None:

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if tracker.phase == "forward" and not watched.forward:
                hidden = args[0] if args else kwargs["hidden_states"]
                watched.input = tracker.block_of(hidden)
                watched.forward.append(len(tracker.log))
                if hidden.requires_grad:
                    hidden.register_hook(lambda gradient: watched.backward.append(len(tracker.log)))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if tracker.phase == "forward" and len(watched.forward) == 1:
                watched.forward.append(len(tracker.log))
                watched.output = tracker.block_of(output)
                if output.requires_grad:
                    output.register_hook(lambda gradient: watched.backward.insert(0, len(tracker.log)))

        hooks.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(layer.register_forward_hook(after))

    for layer, watched in zip(layers, seen, strict=True):
        watch(layer, watched)
    try:
        yield recordings
    finally:
        for hook in hooks:
            hook.remove()
    for one, watched, logits in zip(recordings, seen, shown, strict=True):
        if logits is not None:
            one.logits = logits.shape, logits.dtype
        _fill(one, watched, tracker, None if logits is None else logits.block)


def _fill(recording: Recording, watched: _Watched, tracker: Tracker, logits: int | None) -> None:
    start, stop = watched.forward
    positions: dict[int, int] = {}

    def read(start: int, stop: int) -> Iterator[Entry]:
        for entry in tracker.log[start:stop]:
            if entry >= 0:
                block = tracker.blocks[entry]
                outlives = block.died is None or block.died >= stop
                is_boundary = entry in (watched.output, logits) or (start != watched.forward[0] and outlives)
                if not is_boundary and block.part != "gradients" and not block.fetched:
                    positions[entry] = len(positions)
                    yield positions[entry], block.bytes, block.op, block.on_host
            elif ~entry in positions:
                yield positions[~entry], -1, "", False

    recording.forward = list(read(start, stop))
    if watched.backward:
        began, *rest = watched.backward
        ended = rest[-1] if rest else max(tracker.blocks[number].died or began for number in positions)
        # What died between the two, such as what the layer's call itself held, is not kept for backward.
        gone = [number for number in positions if stop <= (tracker.blocks[number].died or ended) < began]
        recording.forward += [(positions[number], -1, "", False) for number in gone]
        recording.backward = list(read(began, ended))
        kept = None if watched.input is None else tracker.blocks[watched.input]
        recording.keeps_input = kept is not None and (kept.died is None or kept.died > began)
