"""Which storages are alive, and when: the one instrument for real tensors and for fake ones.

A storage is born when an operation first returns a tensor on it, and dies when nothing refers to it any more. What a
kernel allocates and frees inside itself is not seen; of CUDA kernels it is known (kernels/workspace.py).

Autograd adds a gradient onto one that it holds alone in place (`can_accumulate_inplace` in
`torch/csrc/autograd/input_buffer.cpp`), but not while a dispatch mode such as this one is on: then it makes a third
tensor. The log has what happens without the mode.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moetune.adapt.attention import Capability
from moetune.compat.torch import called_by_autograd, noting_resizes, unguarded
from moetune.experts.host import host_source, stays_on_host
from moetune.memory.kernels import workspace
from moetune.memory.report import PartName, Phase
from moetune.memory.time.counter import Counter
from moetune.memory.time.work import WorkPart
from moetune.memory.trace.log import Block, Cut, Log, Mark, Sent
from moetune.parallel.messages import NAMESPACES, message

_MADE_OF_OTHERS = (DTensor, AsyncCollectiveTensor)
_DEVICE = torch.ops.prim.device.default
_COPY = torch.ops.aten.copy_.default
_ADD = torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class _Sum:
    """A gradient that autograd has just added up: its block and the id of its storage, and the block of the gradient
    that it was added onto."""

    block: int
    storage: int
    onto: int


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is no view of another one, which it would keep, and its numbers fill a stretch of memory."""
    if tensor._is_view():
        return False
    sizes = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return all(stride for _, stride in sizes) and tensor.numel() == 1 + sum((n - 1) * stride for n, stride in sizes)


@unguarded
class Tracker(TorchDispatchMode):
    """Follows every storage between `with tracker:` and its end.

    Args:
        modules: module -> path, of the modules that a moment is named by; deeper ones count as part of these.
        limit: bytes of the device, as if it had no more; None for any. An operation whose result is beyond them raises
            torch's own `OutOfMemoryError`.
        capability: of the GPU whose kernels' workspaces are noted; None for the CPU's.
        parts: module path -> part of a step, to count the work of that GPU.

    Attributes:
        log: all that was noted.
        counter: counts the GPU's work, if there are `parts`.
        refused: the place in the log at which the last result was beyond the limit, and its bytes.
    """

    def __init__(
        self,
        modules: dict[nn.Module, str],
        limit: int | None = None,
        *,
        capability: Capability | None = None,
        parts: Mapping[str, WorkPart] | None = None,
    ) -> None:
        super().__init__()
        self.limit, self.refused = limit, (0, 0)
        self._bytes = 0  # that are alive on the device
        self.log = Log()
        self.step = self.micro_step = 0
        self.phase: Phase = "load"
        self.module = ""
        self.experts: tuple[int, ...] = ()
        self.modules = modules
        self._stack: list[tuple[str, Phase]] = []
        self._alive: dict[int, int] = {}  # id of a storage -> its block
        self._knows_host = False  # whether any block is the host's
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sum: _Sum | None = None
        self._capability = capability
        self.counter = None if capability is None or parts is None else Counter(capability, self, parts, self.log.done)

    # --- What is alive ------------------------------------------------------------------------------------------

    def add(self, tensor: Tensor, part: PartName = "transient_peak", op: str = "") -> None:
        """Follows the storage of a tensor from now on, if it has one and is not followed yet."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive or (not isinstance(tensor, FakeTensor) and tensor.is_meta):
            return
        self._alive[key] = self.birth(storage.nbytes(), part, op, on_host=stays_on_host(tensor))
        self._references[key] = weakref.ref(storage, partial(self._died, key))
        self.read_marks(tensor)

    def read_marks(self, tensor: Tensor) -> None:
        """Takes over what the storage of a followed tensor is marked as: the host's, or a copy of such a one."""
        block = self.log.blocks[self._alive[id(tensor.untyped_storage())]]
        if stays_on_host(tensor):
            self._take_off_device(block)
            block.on_host = True
        self._knows_host = self._knows_host or block.on_host
        if (source := host_source(tensor)) is not None and not block.fetched:
            block.fetched = True
            if id(source) in self._alive:
                block.part = self.log.blocks[self._alive[id(source)]].part  # a copy is what its original is

    def birth(self, size: int, part: PartName, op: str, *, on_host: bool = False) -> int:
        """Notes that `size` bytes are alive from now on; returns the number of their block."""
        born = len(self.log.entries)
        if self.limit is not None and not on_host and self._bytes + size > self.limit:
            self.refused = born, size
            raise torch.OutOfMemoryError(f"{op or 'a tensor'} of {size:,} bytes is beyond the {self.limit:,} there are")
        self._bytes += 0 if on_host else size
        block = Block(size, part, self.phase, self.module, op, born, on_host=on_host, experts=self.experts)
        self.log.blocks.append(block)
        self.log.entries.append(len(self.log.blocks) - 1)
        return len(self.log.blocks) - 1

    def death(self, number: int) -> None:
        """Notes that a block is gone."""
        if self._sum is not None and self._sum.onto == number and self.log.entries[-1] == self._sum.block:
            self._was_in_place(self._sum)
            return
        block = self.log.blocks[number]
        block.died = len(self.log.entries)
        self._take_off_device(block)
        self.log.entries.append(~number)

    def _take_off_device(self, block: Block) -> None:
        self._bytes -= 0 if block.on_host else block.bytes

    def _was_in_place(self, added: _Sum) -> None:
        """Takes back the birth of a sum: what it was added onto went with it, so autograd held that alone."""
        self.log.entries.pop()
        self._take_off_device(self.log.blocks.pop())
        self._alive[added.storage] = added.onto
        self._sum = None

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were alive on the device at once."""
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
        """What dies from now on is not noted: the steps are over."""
        self._references.clear()
        self._alive.clear()

    def tag(self, tensors: Iterable[Tensor | None], part: PartName) -> None:
        """Says what these tensors are, from their birth on."""
        for tensor in tensors:
            if tensor is not None and (number := self.block_of(tensor)) is not None:
                self.log.blocks[number].part = part
                self.read_marks(tensor)

    def belongs(self, tensor: Tensor, layer: int | None, label: str | None = None, *, in_bank: bool = False) -> None:
        """Notes the decoder layer of a tensor, whenever it was born, and its label."""
        if (number := self.block_of(tensor)) is not None:
            block = self.log.blocks[number]
            block.layer, block.in_bank = layer, block.in_bank or in_bank
            if label is not None:
                block.module, block.op = "", label

    def moved_to_host(self, tensor: Tensor, *, managed: bool = False) -> None:
        """Says that a tensor is on the host, which counts apart.

        Args:
            managed: whether the driver may have it on either side.
        """
        if (number := self.block_of(tensor)) is not None:
            block = self.log.blocks[number]
            self._take_off_device(block)
            block.on_host, block.managed = True, managed

    def block_of(self, tensor: Tensor) -> int | None:
        """The number of a tensor's storage, if it is followed."""
        return self._alive.get(id(tensor.untyped_storage()))

    def place(self) -> int:
        """The length of the log."""
        return len(self.log.entries)

    def is_host(self, tensor: Tensor) -> bool:
        """Whether a followed tensor is the host's."""
        return self._knows_host and (number := self.block_of(tensor)) is not None and self.log.blocks[number].on_host

    def trains(self, tensor: Tensor) -> bool:
        """Whether a tensor is a weight that trains."""
        return (number := self.block_of(tensor)) is not None and self.log.blocks[number].part == "trainable_weights"

    def saved_since(self, born: int) -> None:
        """Says that what was born since then and is still alive was kept for backward."""
        for block in self.log.blocks[bisect_left(self.log.blocks, born, key=lambda block: block.born) :]:
            if block.died is None and block.part == "transient_peak":
                block.part = "saved_activations"

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Notes that a storage was given or has lost its bytes, as FSDP2's gathered weights do."""
        key = id(storage)
        if key in self._alive:
            self.death(self._alive.pop(key))
            del self._references[key]
        if storage.nbytes():
            self._alive[key] = self.birth(storage.nbytes(), "transient_peak", "resize_")
            self._references[key] = weakref.ref(storage, partial(self._died, key))

    def __enter__(self) -> Tracker:
        self._noting = noting_resizes(self.resized)
        self._noting.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._noting.__exit__(*exception)
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # torch asks more often than it computes; its own way to the answer is long
        if any(issubclass(kind, _MADE_OF_OTHERS) for kind in types):
            return NotImplemented  # what they do with the tensors that they are made of comes here again
        if func.namespace in NAMESPACES and (sent := message(func, args)) is not None:
            found = next((self.block_of(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)), None)
            self.log.sent.append(Sent(len(self.log.entries), self.step, self.micro_step, self.phase, sent, found))
        kwargs, capability = kwargs or {}, self._capability
        inside = [] if capability is None else self._births(func, workspace.before(func, capability, args, kwargs))
        out = func(*args, **kwargs)
        born = len(self.log.blocks)
        if isinstance(out, Tensor):
            self.add(out, op=func.__name__)
            if func is _ADD and self.phase == "backward" and _is_whole(args[0]) and called_by_autograd():
                onto = self.block_of(args[0])
                self._sum = None if onto is None else _Sum(born, id(out.untyped_storage()), onto)
        elif out is not None:
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self.add(leaf, op=func.__name__)
        if func is _COPY and id(args[0].untyped_storage()) in self._alive:
            self.read_marks(args[0])  # marked after it was born, and filled next
        elif self._knows_host and len(self.log.blocks) > born and self._on_host(args, kwargs):
            for block in self.log.blocks[born:]:
                self._take_off_device(block)
                block.on_host = True
        if self.counter is not None:
            self.counter.count(func, args, kwargs, out)
        if capability is not None:
            for number in reversed([*inside, *self._births(func, workspace.after(func, capability, args))]):
                self.death(number)
            for output in workspace.HOST_OUTPUTS.get(func, ()):
                self.moved_to_host(out[output])
        return out

    def _births(self, func: Any, sizes: Iterable[int]) -> list[int]:
        """Notes what a kernel takes inside itself."""
        return [self.birth(size, "transient_peak", f"inside {func.__name__}") for size in sizes if size]

    def _on_host(self, args: Any, kwargs: Any) -> bool:
        """Whether an operation's tensors are all the host's: it runs there, then, and its results are there."""
        numbers = [self.block_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return bool(numbers) and all(number is not None and self.log.blocks[number].on_host for number in numbers)

    # --- When: phases and modules -------------------------------------------------------------------------------

    def enter(self, phase: Phase, module: str = "") -> None:
        """Begins a phase, or the part of one that belongs to a module."""
        if (phase, module) != (self.phase, self.module):
            self.phase, self.module = phase, module
            self.log.marks.append(Mark(len(self.log.entries), self.step, self.micro_step, phase, module))

    def enter_experts(self, experts: Sequence[int]) -> None:
        """Says whose rows are computed next."""
        self.experts = tuple(experts)

    def cut(self, layer: int, *, backward: bool) -> None:
        """Notes that a layer's forward ends here, or its backward begins."""
        if backward or self.phase in ("forward", "evaluation"):  # not where it runs again
            self.log.cuts.append(Cut(len(self.log.entries), layer, backward))

    def _enter_backward(self, module: str) -> None:
        """Gradients that the loss makes of its head in forward are part of forward."""
        if self.phase in ("backward", "recompute"):
            self.enter("backward", module)

    @contextmanager
    def following(self, trained: Sequence[nn.Parameter]) -> Iterator[None]:
        """Follows inside what happens, by hooks: modules in forward by their calls, in backward by the
        gradients that arrive at them; gradients of parameters when they arrive and when they are accumulated."""

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
