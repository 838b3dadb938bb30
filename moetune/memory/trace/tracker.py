"""`Tracker`: a dispatch mode that records when each storage is allocated and freed.

A storage counts as allocated when an operation first returns a tensor on it, and as freed when nothing refers to it any
more. A dispatch mode cannot observe what a kernel allocates and frees while it runs; for CUDA kernels the tracker adds
these workspaces from a table (kernels/workspace.py).

Autograd accumulates a gradient in place into one that it alone holds (`can_accumulate_inplace` in
`torch/csrc/autograd/input_buffer.cpp`), but allocates a third tensor while any dispatch mode is active. The log records
the sum as in place, as it happens without the mode.
"""

import weakref
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from moetune.adapt.attention import Capability
from moetune.compat.fake_mode import run_below
from moetune.compat.torch import called_by_autograd, noting_resizes, unguarded
from moetune.experts.host import host_source, stays_on_host
from moetune.kernels.runner import Outputs, running_by
from moetune.memory.kernels import workspace
from moetune.memory.report import FORWARD_PHASES, ONCE_PHASES, PartName, Phase
from moetune.memory.time.work import Done, Work, WorkPart, size_of, tensors_in, works, written_by
from moetune.memory.trace.log import OUTSIDE, Block, Cut, Log, Mark, Sent, Turn
from moetune.memory.trace.segments import Point, Segment, key_of
from moetune.parallel.messages import NAMESPACES, message

_MADE_OF_OTHERS = (DTensor, AsyncCollectiveTensor)
_DEVICE = torch.ops.prim.device.default
_COPY = torch.ops.aten.copy_.default
_ADD = torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class _Sum:
    """A sum of two gradients, which autograd may compute in place if no dispatch mode is active: number of its block,
    id() of its storage, and as `onto` the number of the first operand's block, which a sum in place would overwrite."""

    block: int
    storage: int
    onto: int


def _is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor is no view and its elements fill a contiguous range of memory, in any order."""
    if tensor._is_view():
        return False
    sizes = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return all(stride for _, stride in sizes) and tensor.numel() == 1 + sum((n - 1) * stride for n, stride in sizes)


@unguarded
class Tracker(TorchDispatchMode):
    """Records in a log every storage that operations allocate and free within `with tracker:`.

    Tensors that exist before are added by `add`. Callers set `step` and `micro_step`, and begin phases by `enter`.

    Args:
        modules: module -> path, for the modules that reports name; an operation in a deeper module counts as part of
            the innermost of these.
        capability: compute capability of the GPU whose workspaces are added; None for a CPU, without workspaces.
        on_cpu: add what operations take inside on a CPU (`workspace.on_cpu`).
        parts: module path -> part of a step, by which work is counted; None not to count any.
        condensed: whether a segment that is written again is (`Segment.condensed`), which the allocator's simulation
            cannot use.

    Attributes:
        step, micro_step: numbers from 0 that new records carry.
        phase, module: phase, and path of the module, that new storages are recorded under.
        counts: whether work is counted.
    """

    _segments: ClassVar[dict[Hashable, Segment | None]] = {}

    def __init__(
        self,
        modules: dict[nn.Module, str],
        *,
        capability: Capability | None = None,
        parts: Mapping[str, WorkPart] | None = None,
        on_cpu: bool = False,
        condensed: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = Log()
        self.step = self.micro_step = 0
        self.phase: Phase = "load"
        self.module = ""
        self.modules = modules
        self._stack: list[tuple[str, Phase]] = []
        self._takes_turns = False
        self._paused: dict[int, tuple[list[tuple[str, Phase]], str]] = {}  # micro-batch -> stack and module
        self._alive: dict[int, int] = {}  # id of a storage -> number of its block
        self._knows_host = False  # whether any block is in host memory
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sum: _Sum | None = None
        self._group: tuple[Hashable, Point] | None = None  # the group of experts that is computed, and its start
        self._groups: dict[Hashable, tuple[Segment, list[int]]] = {}
        self._begun = set[str]()  # kinds of which a group was computed in this pass over a layer's experts
        self._is_writing = False  # whether outputs of a segment are made, whose storages are in the log
        self._capability, self._on_cpu, self._condensed = capability, on_cpu, condensed
        self.counts, self._parts = capability is not None and parts is not None, parts or {}

    # --- What is alive ------------------------------------------------------------------------------------------

    def add(self, tensor: Tensor, part: PartName = "transient_peak", op: str = "") -> None:
        """Record the storage of a tensor as allocated now, by the operation `op` (or with it as label), in the line
        `part` of the memory report; do nothing for meta tensors and known storages."""
        storage = tensor.untyped_storage()
        key = id(storage)
        is_meta = tensor.fake_device.type == "meta" if isinstance(tensor, FakeTensor) else tensor.is_meta
        if key in self._alive or is_meta:
            return
        self._hold(storage, self.birth(storage.nbytes(), part, op, on_host=stays_on_host(tensor)))
        self.read_marks(tensor)

    def _hold(self, storage: torch.UntypedStorage, number: int) -> None:
        """Take the block with this number for a storage, until nothing refers to it."""
        key = id(storage)
        self._alive[key] = number
        self._references[key] = weakref.ref(storage, partial(self._died, key))

    def read_marks(self, tensor: Tensor) -> None:
        """Update the block of a tracked tensor from the marks on its storage (`experts/host.py`): whether it is host
        memory, and whether it is a copy of host memory, which then counts as the same part as its original."""
        block = self.log.blocks[self._alive[id(tensor.untyped_storage())]]
        block.on_host = block.on_host or stays_on_host(tensor)
        self._knows_host = self._knows_host or block.on_host
        if (source := host_source(tensor)) is not None and not block.fetched:
            block.fetched = True
            if id(source) in self._alive:
                block.part = self.log.blocks[self._alive[id(source)]].part  # counted like its original

    def birth(self, size: int, part: PartName, op: str, *, on_host: bool = False) -> int:
        """Record an allocation of `size` bytes, by the operation or with the label `op`; return its block's number."""
        number = len(self.log.blocks)
        self.log.blocks.append(Block(size, part, self.phase, self.module, op, self.place(), on_host=on_host))
        self.log.entries.append(number)
        return number

    def death(self, number: int) -> None:
        """Record that the block with this number is freed. If it is the first operand of the sum that was recorded
        last, undo the sum's allocation instead, because autograd then adds in place."""
        if self._sum is not None and self._sum.onto == number and self.log.entries[-1] == self._sum.block:
            self.log.entries.pop()
            self.log.blocks.pop()
            self._alive[self._sum.storage], self._sum = number, None
            return
        self.log.blocks[number].died = self.place()
        self.log.entries.append(~number)

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes allocated on the device at once, over the whole log."""
        alive = peak = 0
        for entry in self.log.entries:
            block = self.log.blocks[entry if entry >= 0 else ~entry]
            if not block.on_host:
                alive += block.bytes if entry >= 0 else -block.bytes
                peak = max(peak, alive)
        return peak

    def _died(self, key: int, _: object) -> None:
        del self._references[key]
        self.death(self._alive.pop(key))

    def stop(self) -> None:
        """Forget all live storages: releases after this call are not recorded."""
        self._references.clear()
        self._alive.clear()

    def tag(self, tensors: Iterable[Tensor | None], part: PartName) -> None:
        """Count these tensors' storages in the line `part` of the memory report, for their whole lifetime. None and
        tensors whose storages are not tracked are skipped."""
        for tensor in tensors:
            if tensor is not None and (number := self.block_of(tensor)) is not None:
                self.log.blocks[number].part = part
                self.read_marks(tensor)

    def belongs(self, tensor: Tensor, layer: int | None, label: str | None = None, *, in_bank: bool = False) -> None:
        """Set the number of the decoder layer that a tensor's storage belongs to; do nothing if it is not tracked.

        None stands for the layer in which it was allocated. A `label` replaces the names of module and operation in
        reports. `in_bank` marks a tensor of an expert bank; False leaves an earlier True.
        """
        if (number := self.block_of(tensor)) is not None:
            block = self.log.blocks[number]
            block.layer, block.in_bank = layer, block.in_bank or in_bank
            if label is not None:
                block.module, block.op = "", label

    def moved_to_host(self, tensor: Tensor, *, managed: bool = False) -> None:
        """Record a tracked tensor as host memory, which does not count towards the device's bytes; `managed` if it is
        CUDA managed memory, which the driver may move to the device."""
        if (number := self.block_of(tensor)) is not None:
            block = self.log.blocks[number]
            block.on_host, block.managed = True, managed

    def block_of(self, tensor: Tensor) -> int | None:
        """Return the index in `log.blocks` of a tensor's storage; None if the storage is not tracked."""
        return self._alive.get(id(tensor.untyped_storage()))

    def place(self) -> int:
        """Return the number of entries in the log so far, which is the index of the next."""
        return len(self.log.entries)

    def is_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor is tracked as host memory."""
        return self._knows_host and (number := self.block_of(tensor)) is not None and self.log.blocks[number].on_host

    def saved_since(self, born: int) -> None:
        """Mark the temporary storages that are alive, and were allocated from `log.entries[born]` on, as saved
        activations."""
        for block in self.log.blocks[bisect_left(self.log.blocks, born, key=lambda block: block.born) :]:
            if block.died is None and block.part == "transient_peak":
                block.part = "saved_activations"

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that `UntypedStorage.resize_` allocated or freed a storage, as FSDP2 does with gathered weights."""
        key = id(storage)
        if key in self._alive:
            self.death(self._alive.pop(key))
            del self._references[key]
        if storage.nbytes():
            self._hold(storage, self.birth(storage.nbytes(), "transient_peak", "resize_"))

    def __enter__(self) -> "Tracker":
        self._stacked = ExitStack()
        self._stacked.enter_context(noting_resizes(self.resized))
        self._stacked.enter_context(running_by(self._run, self._each))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stacked.close()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def _run(
        self, key: Hashable, function: Callable[[Sequence[Tensor]], Outputs], tensors: Sequence[Tensor]
    ) -> Outputs:
        """Call a function of fake tensors, or write again what it allocated when it was first called (segments.py)."""
        if (of_tensors := key_of(tensors)) is None:
            return function(tensors)
        work = self.part() if self.counts else None
        key = (key, of_tensors, self._capability, self._on_cpu, work, self.phase)
        inputs = [self.block_of(tensor) for tensor in tensors]
        if (known := self._segments.get(key)) is not None:
            return self._written(known, inputs)
        start, self._sum = Point.of(self.log), None
        made = function(tensors)
        self._sum = None
        self._segments[key] = self._since(start, inputs, made)
        return made

    def _each(self, count: int, tensor: Tensor) -> Iterator[int]:
        """Yield the numbers of a loop that are run: of fake tensors 0 and 1, whose work counts for all others too. What
        these allocate is not written: it was allocated and freed before."""
        yield from range(min(count, 1))
        start, self._sum = Point.of(self.log), None
        for number in range(1, count):
            yield number
            if number == 1 and key_of([tensor]) and self._since(start, self._worked_on(start), times=count - 1):
                return

    def _add_work(self, segment: Segment, at: int, inputs: Sequence[int | None], times: int = 1) -> None:
        """Record the work of a segment whose first entry is `log.entries[at]`, and that is done so many times."""
        for done in segment.done:
            block = None if done.block is None else inputs[done.block]
            self.log.done.append(Done(at, self.step, self.turn, done.part, done.work, block, done.times * times))

    def _written(self, segment: Segment, inputs: Sequence[int | None]) -> Outputs:
        """Write a segment at the end of the log, for inputs with these blocks; return its outputs."""
        segment, first = segment.condensed if self._condensed else segment, len(self.log.blocks)
        self._add_work(segment, len(self.log.entries), inputs)
        self._sum = None
        for entry in segment.entries:
            if entry >= 0:
                size, op = segment.blocks[entry]
                self.birth(size, "transient_peak", op)
            else:
                self.death(~entry + first)
        self._is_writing = True
        made = segment.tensors()
        self._is_writing = False
        for tensor, output in zip(made, segment.outputs, strict=True):
            if tensor is not None and output is not None:
                self._hold(tensor.untyped_storage(), first + output.block)
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # a shortcut: torch asks for it very often
        kwargs = kwargs or {}
        if self._is_writing:
            return run_below(func, types, args, kwargs)
        if any(kind is not FakeTensor and issubclass(kind, _MADE_OF_OTHERS) for kind in types):
            return NotImplemented  # their operations on the inner tensors are dispatched here again
        if func.is_view and self._knows(args[0]):
            return run_below(func, types, args, kwargs)  # allocates nothing, does no work
        if func.namespace in NAMESPACES and (sent := message(func, args)) is not None:
            of_block = next(map(self.block_of, tensors_in(args)), None)
            micro_step = None if self.phase in ONCE_PHASES else self.turn
            self.log.sent.append(Sent(len(self.log.entries), self.step, micro_step, self.phase, sent, of_block))
        capability = self._capability
        inside = [] if capability is None else self._births(func, workspace.before(func, capability, args, kwargs))
        for number in self._births(func, workspace.on_cpu(func, args)) if self._on_cpu else ():
            self.death(number)
        out = run_below(func, types, args, kwargs)
        born = len(self.log.blocks)
        if isinstance(out, Tensor):
            self.add(out, op=func.__name__)
            if func is _ADD and self.phase == "backward" and _is_whole(args[0]) and called_by_autograd():
                onto = self.block_of(args[0])
                self._sum = None if onto is None else _Sum(born, id(out.untyped_storage()), onto)
        elif out is not None:
            for made in tensors_in((out,)):
                self.add(made, op=func.__name__)
        if func is _COPY and id(args[0].untyped_storage()) in self._alive:
            self.read_marks(args[0])  # marked after its allocation, before this copy fills it
        elif self._knows_host and len(self.log.blocks) > born and self._on_host(args, kwargs):
            for block in self.log.blocks[born:]:
                block.on_host = True
        if capability is not None:
            if self.counts:
                self._count(func, args, kwargs, out, capability)
            for number in reversed([*inside, *self._births(func, workspace.after(func, capability, args))]):
                self.death(number)
            for output in workspace.HOST_OUTPUTS.get(func, ()):
                self.moved_to_host(out[output])
        return out

    def _knows(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and id(tensor.untyped_storage()) in self._alive

    def _births(self, func: Any, sizes: Iterable[int]) -> list[int]:
        """Record the workspaces of a kernel, in bytes, as allocated; return the numbers of their blocks."""
        return [self.birth(size, "transient_peak", f"inside {func.__name__}") for size in sizes if size]

    def _on_host(self, args: Any, kwargs: Any) -> bool:
        """Return whether an operation runs on the host: all its tensor arguments are tracked as host memory."""
        on_host = map(self.is_host, tensors_in((args, *kwargs.values())))
        return next(on_host, False) and all(on_host)

    # --- Work ---------------------------------------------------------------------------------------------------

    def part(self) -> WorkPart:
        """Return the part of the step to which work counts now: `optimizer` in that phase, else that of the running
        module."""
        return "optimizer" if self.phase == "optimizer" else self._parts.get(self.module, "rest")

    def note(self, work: Work, part: WorkPart | None = None, of: Tensor | None = None) -> None:
        """Record work that is done now; do nothing while weights are loaded, during evaluation, or if none is counted.

        Args:
            part: the part to which the work counts; None: the part of the module that runs.
            of: a tensor whose storage belongs to the decoder layer that the work counts for; None if unknown.
        """
        if self.counts and self.phase not in ("load", "evaluation"):
            micro_step = None if self.phase in ONCE_PHASES else self.turn
            block = None if of is None else self.block_of(of)
            self.log.done.append(Done(self.place(), self.step, micro_step, part or self.part(), work, block))

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, capability: Capability) -> None:
        """Record the work that one operation, whose result is `out`, would do on a GPU.

        Updates of trained weights count as `optimizer`, copies between host and GPU as `transfers`, operations on host
        tensors as `host`, and dequantization by itself. Anything else counts as the part of the module that runs.
        """
        written = written_by(func, args)
        number = None if written is None else self.block_of(written)
        updates = number is not None and self.log.blocks[number].part == "trainable_weights"
        part: WorkPart | None = "optimizer" if updates else None
        if part is None and func._opname.startswith("dequantize"):
            part = "dequantization"
        for work, tensor in works(func, args, kwargs, out, capability):
            on_host = tensor is not None and self.is_host(tensor)
            if func._opname == "copy_" and on_host != self.is_host(args[1]):
                self.note(Work(copied=size_of(args[0])), "transfers", tensor)
            elif on_host:
                self.note(Work(flops32=work.flops + work.flops32, bytes=work.bytes), "host", tensor)
            else:
                self.note(work, part, tensor)

    # --- When: phases and modules -------------------------------------------------------------------------------

    def enter(self, phase: Phase, module: str = "") -> None:
        """Set the phase, and the path of the running module, of everything that is recorded next."""
        if (phase, module) != (self.phase, self.module):
            self.phase, self.module = phase, module
            self.log.marks.append(Mark(len(self.log.entries), self.step, self.micro_step, phase, module))

    @property
    def turn(self) -> int:
        """Number of the micro-batch that computes, in its step; `OUTSIDE` for what several that take turns share."""
        return self.log.turns[-1].micro_batch if self.log.turns else self.micro_step

    def take_turn(self, micro_batch: int) -> None:
        """Record that from now on this micro-batch computes, or with `OUTSIDE` none of several. Nothing is recorded
        where micro-batches do not take turns (`turn_of`)."""
        if self._takes_turns and (not self.log.turns or self.turn != micro_batch):
            self.log.turns.append(Turn(len(self.log.entries), micro_batch))

    @contextmanager
    def turn_of(self, micro_batch: int) -> Iterator[None]:
        """Record what runs within the `with` block as a micro-batch's, in the modules in which its last turn ended."""
        self._takes_turns = True
        self._stack, module = self._paused.pop(micro_batch, ([], ""))
        self.take_turn(micro_batch)
        self.enter(self.phase, module)
        yield
        self._paused[micro_batch] = self._stack, self.module
        self._stack = []
        self.enter(self.phase)
        self.take_turn(OUTSIDE)

    def enter_experts(self, experts: Sequence[int]) -> None:
        """End the group of experts that was computed; `experts` are those that are computed next, empty for none."""
        self._end_group()
        if not experts:
            self._begun.clear()

    def is_written(self, bank: Hashable, kind: str, counts: Sequence[int]) -> bool:
        """Write what a group of a bank's experts allocates if one like it was computed in this phase, and return True;
        else return False, and what is recorded until the next group is this group's.

        In each pass the first group of a kind is computed: experts are fetched, and gradients allocated, with it.
        """
        key = bank, self.phase, kind, *counts
        if kind in self._begun and (known := self._groups.get(key)) is not None:
            self._written(*known)
            return True
        self._begun.add(kind)
        self._group = key, Point.of(self.log)
        return False

    def _end_group(self) -> None:
        """Make a segment of what the last group has recorded, if it leaves nothing behind."""
        if self._group is None:
            return
        (key, start), self._group = self._group, None
        inputs = self._worked_on(start)
        if (segment := self._since(start, inputs)) is not None:
            self._groups[key] = segment, inputs

    def _worked_on(self, start: Point) -> list[int]:
        """Return the older blocks of which work was recorded since `start`."""
        blocks = (done.block for done in self.log.done[start.done :] if done.block is not None)
        return list(dict.fromkeys(block for block in blocks if block < start.blocks))

    def _since(self, start: Point, inputs: Sequence[int | None], made: Outputs = (), times: int = 1) -> Segment | None:
        """Return what was recorded since `start` on blocks `inputs`; None if it leaves more behind than what it `made`.
        Its work then counts so many times."""
        storages = [None if output is None else self.block_of(output) for output in made]
        if (segment := Segment.of(self.log, start, inputs, made, storages)) is not None:
            del self.log.done[start.done :]
            self._add_work(segment, start.entries, inputs, times)
        return segment

    def cut(self, layer: int, *, backward: bool) -> None:
        """Record the end of a decoder layer's forward pass, or with `backward` the start of its backward pass.

        `layer` is the layer's number, or `OUTSIDE`. An end of forward is ignored while the layer is recomputed in
        backward.
        """
        if backward or self.phase in FORWARD_PHASES:  # not in a recomputation
            self.log.cuts.append(Cut(len(self.log.entries), layer, backward))

    def _enter_backward(self, module: str) -> None:
        """Enter a module in backward; ignored in forward, where the loss already computes its LM head's gradients."""
        if self.phase in ("backward", "recompute"):
            self.enter("backward", module)

    @contextmanager
    def following(self, trained: Sequence[nn.Parameter]) -> Iterator[None]:
        """Record, by global hooks within the `with` block, which named module runs and which tensors are gradients of
        `trained`. A module is entered in forward when it is called, and in backward when the gradient of its output
        arrives."""

        def before(module: nn.Module, args: Any) -> None:
            if (path := self.modules.get(module)) is not None:
                self._stack.append((self.module, self.phase))
                inside: dict[Phase, Phase] = {"backward": "recompute", "optimizer": "forward", "load": "forward"}
                self.enter(inside.get(self.phase, self.phase), path)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if (path := self.modules.get(module)) is not None:
                outer, phase = self._stack.pop()
                first = output[0] if isinstance(output, tuple) else output
                if isinstance(first, Tensor) and first.requires_grad and first.grad_fn is not None:
                    first.register_hook(lambda gradient: self._enter_backward(path))
                self.enter(phase, outer)

        hooks = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]
        for parameter in trained:
            hooks.append(parameter.register_hook(lambda gradient: self.tag([gradient], "gradients")))
            hooks.append(parameter.register_post_accumulate_grad_hook(lambda p: self.tag([p.grad], "gradients")))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
