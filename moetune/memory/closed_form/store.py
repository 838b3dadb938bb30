"""Storage on disk of the closed form's records: one file of the cache for each kind of run and rank."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from moetune.cache import read_cached, write_cached
from moetune.memory.closed_form.record import Record
from moetune.memory.closed_form.sizes import Shape
from moetune.memory.trace.alike import Stack
from moetune.memory.trace.repeat import Events


@dataclass(frozen=True)
class KnownHead:
    """Properties of an LM head that decide how the loss divides its tokens.

    Attributes:
        vocabulary: number of logits of a token.
        width: bytes of a logit.
        row_bytes: bytes, for one token, of all tensors of logits that the head allocates in training.
        held_out_row_bytes: the same in an evaluation, without gradients, where LoRA on the head makes more tensors.
        trains: whether any parameter outside of the decoder stack trains.
        loops: whether the model's code loops over documents or pieces of a sequence, so that the number of tensors
            depends on its length.
        copies: whether a copy that is larger than the hidden states is made of several rows only, because an input is
            broadcast over them.
    """

    vocabulary: int
    width: int
    row_bytes: int
    held_out_row_bytes: int
    trains: bool
    loops: bool = False
    copies: bool = False


@dataclass(frozen=True)
class Recorded:
    """All records of one rank of a kind of run, by shape of the batches, and the LM head of its model. `ClosedForm`
    adds records to it."""

    head: KnownHead
    records: dict[Shape, Record] = field(default_factory=dict)
    _events: dict[Hashable, tuple[Events, np.ndarray]] = field(default_factory=dict)

    def events(self, shape: Shape, stack: Stack) -> tuple[Events, np.ndarray]:
        """Expand the record of `shape` to the whole model of `stack`: return its allocations and releases, and
        [storages] the layer in which each is allocated (`Record.repeated`). The result is cached: do not modify it.
        Raise `KeyError` if there is no record of this shape."""
        key = shape, stack
        if key not in self._events:
            self._events[key] = self.records[shape].repeated(stack)
        return self._events[key]


_Content = tuple[KnownHead, list[tuple[Shape, Record]]]


def read(file: Path) -> Recorded | None:
    """Read the records in a file of the cache; None if there are none."""
    found = read_cached(file, _Content)
    return None if found is None else Recorded(found[0], dict(found[1]))


def write(file: Path, recorded: Recorded) -> None:
    """Write records to a file of the cache."""
    write_cached(file, _Content, (recorded.head, list(recorded.records.items())))
