"""`Segment`: what a function allocated, freed and computed in a trace, written again without running it.

A function that allocates the same storages whenever its inputs have the same shapes, and leaves nothing behind but its
outputs, is run once. Later calls append its part of the log, and get outputs of the same shapes. So it is with groups
of experts that are alike (`ExpertHooks.is_written`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from moetune.kernels.runner import Outputs
from moetune.memory.allocator import SMALLEST_BLOCK
from moetune.memory.time.work import Done
from moetune.memory.trace.log import Block, Log


class _Output(NamedTuple):
    """An output: how to make a tensor like it, and its storage, counted from the segment's first block."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    block: int


@dataclass(frozen=True)
class Point:
    """A point in a log: the numbers of its entries, blocks, records of work and all other records."""

    entries: int
    blocks: int
    done: int
    others: int

    @classmethod
    def of(cls, log: Log) -> "Point":
        """Return the end of a log."""
        others = len(log.marks) + len(log.cuts) + len(log.sent)
        return cls(len(log.entries), len(log.blocks), len(log.done), others)


@dataclass(frozen=True)
class Segment:
    """Part of a log.

    Attributes:
        entries: allocations and releases, as in `Log.entries`, with blocks counted from the segment's first.
        blocks: (bytes, operation) of each block.
        done: work, added up for each part of a step and for each input whose decoder layer it counts for: records at 0,
            whose block is the number of the input; None for work on other tensors.
        outputs: what the function returned.
    """

    entries: tuple[int, ...]
    blocks: tuple[tuple[int, str], ...]
    done: tuple[Done, ...]
    outputs: tuple[_Output | None, ...]

    @classmethod
    def of(
        cls, log: Log, start: Point, inputs: Sequence[int | None], made: Outputs, storages: Sequence[int | None]
    ) -> "Segment | None":
        """Return what a log has recorded since `start`; None if more happened than can be written again.

        Args:
            inputs: the blocks of the function's inputs; None for an input that is not tracked.
            made: its outputs.
            storages: the blocks of the outputs; None for an output that is None.
        """
        first, blocks = start.blocks, log.blocks[start.blocks :]
        entries = [entry - first if entry >= 0 else entry + first for entry in log.entries[start.entries :]]
        lasting = {number for number, block in enumerate(blocks) if block.died is None}
        own = [None if number is None else number - first for number in storages]
        if (
            Point.of(log).others != start.others
            or any((entry if entry >= 0 else ~entry) < 0 for entry in entries)
            or len(entries) != 2 * len(blocks) - len(lasting)
            or sorted(lasting) != sorted(number for number in own if number is not None)
            or any(_is_special(block) for block in blocks)
        ):
            return None
        of_input = {number: place for place, number in enumerate(inputs) if number is not None}
        done: dict[Any, Done] = {}
        for record in log.done[start.done :]:
            if record.block is not None and record.block < first and record.block not in of_input:
                return None
            place = None if record.block is None else of_input.get(record.block)
            known = done.get((record.part, place, record.times))
            work = record.work if known is None else known.work + record.work
            done[record.part, place, record.times] = record._replace(at=0, work=work, block=place)
        outputs = tuple(
            None if tensor is None or block is None else _Output(*_like(tensor), block)
            for tensor, block in zip(made, own, strict=True)
        )
        return cls(tuple(entries), tuple((block.bytes, block.op) for block in blocks), tuple(done.values()), outputs)

    @cached_property
    def condensed(self) -> "Segment":
        """The segment without the storages that are neither outputs nor alive at its peaks, of bytes as they are or
        rounded up: whatever else is alive, the log's peaks stay the same, and what is alive at them."""
        kept = {output.block for output in self.outputs if output is not None}
        for unit in (1, SMALLEST_BLOCK):
            sizes = [-(-size // unit) * unit for size, _ in self.blocks]
            sums = list(accumulate(sizes[entry] if entry >= 0 else -sizes[~entry] for entry in self.entries))
            until = self.entries[: sums.index(max(sums)) + 1] if sums else ()
            kept |= {entry for entry in until if entry >= 0} - {~entry for entry in until if entry < 0}
        number = {block: place for place, block in enumerate(sorted(kept))}
        return replace(
            self,
            entries=tuple(
                number[entry] if entry >= 0 else ~number[~entry]
                for entry in self.entries
                if (entry if entry >= 0 else ~entry) in kept
            ),
            blocks=tuple(self.blocks[block] for block in number),
            outputs=tuple(output and output._replace(block=number[output.block]) for output in self.outputs),
        )

    def tensors(self) -> list[Tensor | None]:
        """Return tensors like the outputs, uninitialized."""
        return [None if output is None else _uninitialized(*output[:4]) for output in self.outputs]


def _is_special(block: Block) -> bool:
    """Return whether a block is more than a temporary storage on the device."""
    return block.part != "transient_peak" or block.on_host or block.fetched or block.layer is not None


def _like(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _uninitialized(size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def key_of(tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """Return all that the outputs' shapes, and the storages that a function allocates, depend on; None for real
    tensors, whose values matter."""
    if any(type(tensor) is not FakeTensor for tensor in tensors):
        return None
    return tuple((*_like(tensor), tensor.requires_grad) for tensor in tensors)
