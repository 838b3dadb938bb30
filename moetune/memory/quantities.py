"""The quantities that the closed form computes and that parallelism divides, and the peak that follows from them.

A step has four kinds of moments that can be the peak, an evaluation one; everything below in bytes of one rank:

    loss       static + G + Σ saved + loss
    layer k    static + G' + Σ_{j≤k} saved_j + transient_k
    embedding  static + G' + what the embedding's backward takes
    optimizer  static + gradients + update
    evaluation static + logits + loss, if a held-out batch has more rows than one that trains

static is weights, optimizer states and master weights; what is fetched from the host comes on top (`Fetched`). G is
zero in the first micro-step and all gradients in later ones; G' is the gradients of what backward has passed, in later
micro-steps all of them and those of the layer twice: the new ones are whole before they are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

from moetune.memory.report import Parts


@dataclass(frozen=True)
class Tensors:
    """What a group of parameters takes, in bytes; `numel` counts those that train, `frozen_numel` the others.

    `update` is what the optimizer takes and gives back while it updates the group. `alone` is, of a group whose
    gradients are used up as they come, the largest of them with what its update takes, and `leaving` one that is on its
    way to the host while the next is made; `gradients` is 0 then.
    `packed` is the part of `frozen` that lies in buffers (packed experts and linear layers), which `fsdp` never shards.
    `host` (packed weights) and `host_update` (updates) stay in host memory and are no part of any of these.
    """

    frozen: int = 0
    trainable: int = 0
    gradients: int = 0
    states: int = 0
    master: int = 0
    numel: int = 0
    update: int = 0
    packed: int = 0
    frozen_numel: int = 0
    host: int = 0
    alone: int = 0
    leaving: int = 0
    host_update: int = 0

    @property
    def used_up(self) -> int:
        """Gradients that are there for a moment."""
        return self.alone + self.leaving

    def __add__(self, other: Tensors) -> Tensors:
        return total((self, other))


def total(groups: Iterable[Tensors]) -> Tensors:
    """All groups together; their updates run one after the other, so the largest one counts."""
    groups = tuple(groups)
    sums = {name: sum(getattr(group, name) for group in groups) for name in _SUMMED}
    most = {name: max((getattr(group, name) for group in groups), default=0) for name in _ONE_AT_A_TIME}
    return Tensors(**sums, **most)


_ONE_AT_A_TIME = ("update", "alone", "leaving")
_SUMMED = tuple(field.name for field in fields(Tensors) if field.name not in _ONE_AT_A_TIME)


class Matrix(NamedTuple):
    """A parameter as torch shards it: `rows` along its first dimension, `row` bytes each."""

    rows: int
    row: int
    trains: bool

    @property
    def bytes(self) -> int:
        return self.rows * self.row

    def part(self, ranks: int) -> int:
        """Bytes that each rank has room for; whole rows, so that some may be padding."""
        return -(-self.rows // ranks) * self.row


class Exchange(NamedTuple):
    """Rows of a layer that its experts' ranks exchange: bytes of all that a rank sends away and gets back, of all that
    arrive from others and return to them, and of the table that says how many there are, one way."""

    sent: int
    arrived: int
    counts: int


class Split(NamedTuple):
    """Bytes of whole tensors of a layer that its tensor-parallel ranks add up or gather.

    Attributes:
        added, gathered: in its forward pass.
        added_back, gathered_back: in its backward.
        again: whether `gathered` is, too, when a checkpointed layer runs forward again; that stops once all is there
            that backward reads.
    """

    added: tuple[int, ...]
    added_back: tuple[int, ...]
    gathered: tuple[int, ...] = ()
    gathered_back: tuple[int, ...] = ()
    again: bool = False


@dataclass(frozen=True)
class Transient:
    """What a layer's backward holds at one moment beyond gradients of parameters and other layers' activations.

    `experts` is the share that grows with the rows of the fullest expert, `dense` all the rest. `gradients` and `saved`
    are the shares of the layer's gradients and of what its forward pass kept that exist at this moment. `recomputes`:
    it is before the layer's backward begins. `has_input`: the layer's input, if it was brought back from the host, is
    still there.
    """

    name: str
    dense: int
    experts: int = 0
    gradients: float = 1.0
    saved: float = 1.0
    recomputes: bool = False
    has_input: bool = True


@dataclass(frozen=True)
class Fetched:
    """Copies on the device of what stays on the host: packed experts, and layers' inputs."""

    experts: int = 0
    inputs: int = 0


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    Attributes:
        dense: all but the routed experts.
        experts: one for each that is here; empty in a layer without experts.
        saved: what its forward pass keeps for backward (its input, under checkpointing).
        transients: the moments of its backward that may be its fullest.
        offloaded: its input, where that waits for backward on the host; no part of `saved` then.
        returns: whether its experts run backward.
        matrices: parameters of `dense`; what is packed is none.
        bank: parameters of the experts.
        exchange: what leaves this rank for others' experts; None where all experts are here.
        split: what tensor parallelism sends; None where matrices are whole.
    """

    index: int
    dense: Tensors
    experts: tuple[Tensors, ...]
    saved: int
    transients: tuple[Transient, ...]
    offloaded: int = 0
    returns: bool = True
    matrices: tuple[Matrix, ...] = ()
    bank: tuple[Matrix, ...] = ()
    exchange: Exchange | None = None
    split: Split | None = None

    @cached_property
    def tensors(self) -> Tensors:
        return self.dense + total(self.experts)

    def used_up(self, moment: str) -> int:
        """Gradients that are there for a moment; an expert's is among the rows of the moment in which it is made."""
        return self.dense.leaving if moment == "experts" else self.tensors.used_up


@dataclass(frozen=True)
class Quantities:
    """One rank's model and micro-batch.

    Attributes:
        embedding, head: parameters before the first and after the last layer (a tied head has none).
        batch: the micro-batches of one step, and masks and positions that live through a pass.
        saved: what lives from forward to backward outside of layers (the final norm's input).
        loss: logits and what the loss takes beside them, at most.
        embedding_backward: what the embedding's backward takes, if it trains.
        hidden: one activation [B, S, H].
        accumulate: micro-steps in a step.
        tied: the head is the embedding; a pipeline's last stage then holds a copy of it.
        in_flight: activations of micro-batches that wait in a pipeline for their backward.
        evaluation: what a larger batch of held-out data takes at its loss; 0 if it is no larger.
        table, norm, tail: parameters of the embedding, the final norm, and the head where it is no embedding.
    """

    embedding: Tensors
    layers: tuple[Layer, ...]
    head: Tensors
    batch: int
    saved: int
    loss: int
    embedding_backward: int
    hidden: int
    accumulate: int
    tied: bool = False
    in_flight: int = 0
    evaluation: int = 0
    table: tuple[Matrix, ...] = ()
    norm: tuple[Matrix, ...] = ()
    tail: tuple[Matrix, ...] = ()

    @cached_property
    def tensors(self) -> Tensors:
        return self.embedding + total(layer.tensors for layer in self.layers) + self.head

    @cached_property
    def host_bytes(self) -> int:
        """What is in host memory when the forward pass is through."""
        everything = self.tensors
        return everything.host + everything.host_update + sum(layer.offloaded for layer in self.layers)

    @cached_property
    def _on_host(self) -> tuple[Layer, ...]:
        """The layers whose experts are on the host and run backward."""
        return tuple(layer for layer in self.layers if layer.tensors.host and layer.returns)

    def fetched(self, layer: Layer, moment: Transient) -> Fetched:
        """What has been brought at a moment of a layer's backward: the experts in use and those that are next, which
        change when a layer's experts begin; and the layer's input and that of the layer before."""
        used = [one for one in self._on_host if one.index >= layer.index + moment.recomputes]
        current = used[0] if used else None
        before = [one for one in self._on_host if current is None or one.index < current.index][-1:]
        earlier = [one.offloaded for one in self.layers if one.index < layer.index][-1:]
        return Fetched(
            experts=sum(one.tensors.host for one in before + ([] if current is None else [current])),
            inputs=sum(earlier) + (layer.offloaded if moment.has_input else 0),
        )

    def moments(self) -> Iterator[tuple[str, Parts]]:
        """Every moment that may be the peak, in the order of the last micro-step."""
        everything = self.tensors
        static = Parts(
            frozen_weights=everything.frozen,
            trainable_weights=everything.trainable,
            optimizer_states=everything.states,
            master_weights=everything.master,
        )
        again = self.accumulate > 1
        saved = self.batch + self.in_flight + self.saved + sum(layer.saved for layer in self.layers)
        gradients = everything.gradients if again else 0
        left = sum(layer.tensors.host for layer in self._on_host[-1:])
        yield (
            "loss",
            replace(
                static,
                frozen_weights=static.frozen_weights + left,
                gradients=gradients,
                saved_activations=saved,
                transient_peak=self.loss,
            ),
        )
        gradients += 0 if again else self.head.gradients
        saved -= self.saved
        if self.head.alone:
            yield "head", replace(static, gradients=gradients + self.head.alone, saved_activations=saved)
        for layer in reversed(self.layers):
            own = layer.tensors.gradients
            for moment in layer.transients:
                fetched = self.fetched(layer, moment)
                yield (
                    f"layer {layer.index}: {moment.name}",
                    replace(
                        static,
                        frozen_weights=static.frozen_weights + fetched.experts,
                        gradients=gradients + round(own * moment.gradients) + layer.used_up(moment.name),
                        saved_activations=saved - round(layer.saved * (1 - moment.saved)) + fetched.inputs,
                        transient_peak=moment.dense + moment.experts,
                    ),
                )
            saved -= layer.saved
            gradients += 0 if again else own
        if self.embedding.numel:
            yield (
                "embedding",
                replace(
                    static,
                    frozen_weights=static.frozen_weights + sum(layer.tensors.host for layer in self._on_host[:1]),
                    gradients=gradients + self.embedding.gradients + self.embedding.alone,
                    saved_activations=self.batch + self.in_flight,
                    transient_peak=self.embedding_backward,
                ),
            )
        yield (
            "optimizer",
            replace(
                static,
                gradients=everything.gradients,
                saved_activations=self.batch,
                transient_peak=everything.update,
            ),
        )
        if self.evaluation:
            yield "evaluation", replace(static, transient_peak=self.evaluation)

    def peak(self) -> tuple[str, Parts]:
        """The fullest moment."""
        return max(self.moments(), key=lambda moment: moment[1].total)
