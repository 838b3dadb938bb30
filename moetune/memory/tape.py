"""What autograd keeps, and when: forward passes written down tensor by tensor, and their backward played on sizes.

A closed form of activations needs two numbers of a layer: the bytes that its forward pass leaves for backward, and the
most that is alive at once while its backward runs. Both follow from rules that are the same for every operation:

- An operation whose output needs a gradient keeps what its derivative reads: `a·b` keeps b if a needs a gradient and a
  if b does, a sum keeps nothing, softmax keeps its output. A view is the storage that it looks at.
- Backward takes the operations last to first. One needs its output's gradient, makes those of its inputs, and then lets
  go of what it kept. A second gradient of the same tensor is added to the first in a new tensor.
- A checkpointed layer runs its forward pass again when backward meets the first operation that reads something kept.

So the two numbers are sums over tensors that have a name, a shape and a width; `Alive` lists them at any moment.

A shape is written in the letters of the docs, as in "T·H"; a tape knows what they stand for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Piece(NamedTuple):
    """A tensor by what it is: where it belongs, its name, its shape, and the bytes of one element."""

    where: str
    label: str
    shape: str
    width: int


class Storage:
    """Memory that tensors share. `users` counts, during a backward pass, what still refers to it."""

    __slots__ = ("bytes", "piece", "users")

    def __init__(self, piece: Piece, nbytes: int) -> None:
        self.piece, self.bytes, self.users = piece, nbytes, 0


class Value:
    """A tensor of the forward pass. `external`: someone else accounts for its storage."""

    __slots__ = ("bytes", "external", "needs", "shape", "storage", "width")

    def __init__(self, storage: Storage, shape: str, width: int, nbytes: int, needs: bool, external: bool) -> None:
        self.storage, self.shape, self.width, self.bytes = storage, shape, width, nbytes
        self.needs, self.external = needs, external


class Node(NamedTuple):
    """An operation, seen from backward.

    Attributes:
        fresh: inputs whose gradient is a new tensor.
        passed: inputs whose gradient is the output's, or a view of it.
        saved: what it keeps.
        reads: whether autograd hands its backward anything that was kept, a parameter included.
        temporaries: what its backward takes beside the gradients that it makes.
        gradients: bytes of parameters' gradients that it makes, and how many of them exist at its fullest moment.
    """

    where: str
    label: str
    outputs: tuple[Value, ...]
    fresh: tuple[Value, ...]
    passed: tuple[Value, ...]
    saved: tuple[Storage, ...]
    reads: bool
    temporaries: tuple[Piece, ...]
    gradients: int
    gradients_then: int


@dataclass(frozen=True)
class Moment:
    """The fullest moment of the backward of one part of a layer.

    Attributes:
        where: the part.
        node: twice the number of its operation, plus one for a sum of gradients after it; negative in forward.
        alive: bytes, but for gradients of parameters.
        saved: of these, what the forward pass left.
        rows: of these, what grows with the rows that an expert receives.
        gradients: bytes of parameters' gradients that this layer's backward has alive.
    """

    where: str
    node: int
    alive: int
    saved: int
    rows: int
    gradients: int


class Tape:
    """The operations of one layer in order.

    Args:
        letters: what the letters of shapes stand for.
        fused: parts whose gradients are used up as they come, and so are not among what is made.
    """

    def __init__(self, letters: Mapping[str, int], fused: frozenset[str] = frozenset()) -> None:
        self.letters, self.fused = letters, fused
        self.nodes: list[Node] = []
        self.where = ""
        self._passed: list[tuple[str, int, tuple[Piece, ...]]] = []
        self._sizes: dict[str, int] = {}

    def numel(self, shape: str) -> int:
        """Elements of a shape: "2·T·H" is twice the tokens times the hidden size."""
        if (known := self._sizes.get(shape)) is not None:
            return known
        size = 1
        for factor in shape.split("·"):
            size *= self.letters[factor] if factor in self.letters else int(factor)
        self._sizes[shape] = size
        return size

    def nbytes(self, pieces: Iterable[Piece]) -> int:
        return sum(self.numel(piece.shape) * piece.width for piece in pieces)

    def new(self, label: str, shape: str, width: int, *, needs: bool = False, external: bool = False) -> Value:
        """A tensor with a storage of its own."""
        nbytes = self.numel(shape) * width
        return Value(Storage(Piece(self.where, label, shape, width), nbytes), shape, width, nbytes, needs, external)

    def part_of(self, value: Value, shape: str) -> Value:
        """A tensor on another's storage. It has its own gradient: record the operation that takes it out."""
        return Value(value.storage, shape, value.width, self.numel(shape) * value.width, value.needs, value.external)

    def piece(self, label: str, shape: str, width: int) -> Piece:
        return Piece(self.where, label, shape, width)

    def record(
        self,
        label: str,
        outputs: Value | tuple[Value, ...],
        *,
        fresh: tuple[Value, ...] = (),
        passed: tuple[Value, ...] = (),
        saved: tuple[Value, ...] = (),
        reads: bool = False,
        temporaries: tuple[Piece, ...] = (),
        gradients: int = 0,
        gradients_then: int | None = None,
        part: str = "other",
        trains: bool = False,
    ) -> None:
        """Notes an operation, if a gradient flows through it; its outputs then need one. What keeps activations reads
        them; `reads` says that it reads something else, such as a frozen weight; its gradients belong to `part`."""
        fresh, passed = tuple(v for v in fresh if v.needs), tuple(v for v in passed if v.needs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if not (fresh or passed or gradients or trains):
            for value in outputs:
                value.needs = False
            return
        for value in outputs:
            value.needs = True
        keeps = tuple({id(v.storage): v.storage for v in saved if not v.external}.values())
        if part in self.fused:
            gradients = 0
        then = gradients if gradients_then is None else gradients_then
        self.nodes.append(
            Node(self.where, label, outputs, fresh, passed, keeps, reads or bool(saved), temporaries, gradients, then)
        )  # fmt: skip

    def pass_by(self, *pieces: Piece) -> None:
        """Notes a moment of the forward pass that may be fuller than any of backward: `pieces` are alive then beside
        what is kept so far."""
        self._passed.append((self.where, len(self.nodes), pieces))

    # --- What is left after forward, and what backward has alive ------------------------------------------------

    def saved(self) -> list[Piece]:
        """What the forward pass keeps, each storage once."""
        return [storage.piece for storage in self._saved()]

    def _saved(self, nodes: int | None = None) -> list[Storage]:
        return list({id(s): s for node in self.nodes[:nodes] for s in node.saved}.values())

    def forward(self, output: Value, *, again: bool) -> list[Moment]:
        """The moments that were noted while the forward pass was recorded. `again`: it runs in backward, when the
        gradient of `output` is there already."""
        moments = []
        for number in range(len(self._passed)):
            kept, others = self._forward_pieces(number, output, again)
            saved = self.nbytes(kept)
            where = f"{self._passed[number][0]}, forward"
            moments.append(Moment(where, -1 - number, saved + self.nbytes(others), saved, 0, 0))
        return moments

    def _forward_pieces(self, number: int, output: Value, again: bool) -> tuple[list[Piece], list[Piece]]:
        _, nodes, pieces = self._passed[number]
        waiting = [output.storage.piece._replace(label="gradient of the output")] if again and output.needs else []
        return [storage.piece for storage in self._saved(nodes)], [*pieces, *waiting]

    def backward(self, output: Value, *, accumulating: bool, again: bool) -> list[Moment]:
        """Plays the backward pass from the gradient of `output`; returns the fullest moment of each part.

        Args:
            accumulating: whether gradients of parameters are added to those of earlier micro-batches, each as it comes;
                otherwise they stay.
            again: whether the forward pass runs again in backward.
        """
        return _Backward(self, output, accumulating, again).run()

    def alive_at(
        self, output: Value, moment: Moment, *, accumulating: bool, again: bool
    ) -> tuple[list[Piece], list[Piece]]:
        """(what the forward pass kept, all else) that is alive at a moment; gradients of parameters are left out."""
        if moment.node < 0:
            return self._forward_pieces(-1 - moment.node, output, again)
        player = _Backward(self, output, accumulating, again, stop_at=moment.node)
        player.run()
        return player.alive


class _Backward:
    def __init__(self, tape: Tape, output: Value, accumulating: bool, again: bool, stop_at: int | None = None) -> None:
        self.tape, self.accumulating, self.stop_at = tape, accumulating, stop_at
        self.alive: tuple[list[Piece], list[Piece]] = ([], [])
        self.saved_storages = tape._saved()
        for storage in self.saved_storages:
            storage.users = 0
        for node in tape.nodes:
            for storage in node.saved:
                storage.users += 1
        self.saved = 0
        self.there = False
        if not again:
            self._run_forward()
        self.other = 0
        self.grads: dict[int, Storage] = {}
        self.best: dict[str, Moment] = {}
        if output.needs:
            self.grads[id(output)] = self._gradient(output)

    def run(self) -> list[Moment]:
        made = 0
        for index in range(len(self.tape.nodes) - 1, -1, -1):
            node = self.tape.nodes[index]
            if node.reads and not self.there:
                self._run_forward()
            incoming = [g for v in node.outputs if (g := self.grads.pop(id(v), None)) is not None]
            if incoming:
                arrived = [(value, self._gradient(value)) for value in node.fresh]
                for value in node.passed:
                    incoming[0].users += 1
                    arrived.append((value, incoming[0]))
                gradients = node.gradients_then if self.accumulating else made + node.gradients_then
                self._look(2 * index, node, node.temporaries, gradients)
                if 2 * index == self.stop_at:
                    self._list(node.temporaries, arrived, incoming)
                made += node.gradients
                for storage in incoming:
                    self._release(storage)
            else:
                arrived = []
            for storage in node.saved:
                storage.users -= 1
                if not storage.users:
                    self.saved -= storage.bytes
            for value, storage in arrived:
                if (first := self.grads.get(id(value))) is None:
                    self.grads[id(value)] = storage
                    continue
                self.grads[id(value)] = self._gradient(value)
                self._look(2 * index + 1, node, (), 0 if self.accumulating else made)
                if 2 * index + 1 == self.stop_at:
                    self._list((), arrived, [first])
                self._release(first)
                self._release(storage)
        return list(self.best.values())

    def _run_forward(self) -> None:
        self.there = True
        self.saved = sum(storage.bytes for storage in self.saved_storages)

    def _gradient(self, value: Value) -> Storage:
        storage = Storage(value.storage.piece._replace(label=f"gradient of {value.storage.piece.label}"), value.bytes)
        storage.users = 1
        self.other += storage.bytes
        return storage

    def _release(self, storage: Storage) -> None:
        storage.users -= 1
        if not storage.users:
            self.other -= storage.bytes

    def _look(self, index: int, node: Node, temporaries: tuple[Piece, ...], gradients: int) -> None:
        alive = self.saved + self.other + self.tape.nbytes(temporaries)
        best = self.best.get(node.where)
        if best is None or alive + gradients > best.alive + best.gradients:
            rows = self.tape.nbytes(piece for piece in temporaries if "N" in piece.shape.split("·"))
            self.best[node.where] = Moment(node.where, index, alive, self.saved, rows, gradients)

    def _list(self, temporaries: tuple[Piece, ...], arrived: list, incoming: list[Storage]) -> None:
        others = {id(s): s for s in [*self.grads.values(), *(s for _, s in arrived), *incoming]}
        kept = [s.piece for s in self.saved_storages if s.users] if self.there else []
        self.alive = kept, [*(s.piece for s in others.values()), *temporaries]
