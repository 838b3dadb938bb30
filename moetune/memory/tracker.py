"""Which storages are alive, and when: the one instrument for real tensors and for fake ones.

A storage is born when an operation first returns a tensor on it, and dies when nothing refers to it any more. What a
kernel allocates and frees inside itself is not seen (docs/concepts/trace.md lists what CUDA kernels are known to take).
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
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

from moetune.experts.host import moving, stays_on_host
from moetune.memory.report import PartName, Phase
from moetune.parallel.messages import Message, message

_MADE_OF_OTHERS = (DTensor, AsyncCollectiveTensor)

_DEVICE = torch.ops.prim.device.default


@dataclass(slots=True)
class Block:
    """One storage. `born` and `died` are places in the tracker's log; `died` is None if it outlived the trace. `part`
    is settled only when the trace ends: a gradient is known as one after its birth. `on_host` says that it is the
    host's memory, which counts apart, and `fetched` that it is a copy of such a one on the device."""

    bytes: int
    part: PartName
    phase: Phase
    module: str
    op: str
    born: int
    died: int | None = None
    on_host: bool = False
    fetched: bool = False


@dataclass(frozen=True)
class Mark:
    """From this place of the log on, this phase of this micro-step."""

    at: int
    step: int
    micro_step: int
    phase: Phase
    module: str


class Tracker(TorchDispatchMode):
    """Follows every storage between `with tracker:` and its end.

    Args:
        modules: module -> path, of the modules that a moment is named by; deeper ones count as part of these.

    Attributes:
        blocks: every storage, in order of birth.
        log: births and deaths in order: the number of a block, or ~number when it dies.
        marks: where in the log phases and modules begin.
        alive_bytes, peak_bytes: on the device.
        messages: what was sent to other ranks, with the step, micro-step and phase in which it was.
    """

    def __init__(self, modules: dict[nn.Module, str]) -> None:
        super().__init__()
        self.blocks: list[Block] = []
        self.log: list[int] = []
        self.marks: list[Mark] = []
        self.alive_bytes = self.peak_bytes = 0
        self.step = self.micro_step = 0
        self.phase: Phase = "load"
        self.module = ""
        self.messages: list[tuple[int, int, Phase, Message]] = []
        self._modules = modules
        self._stack: list[tuple[str, Phase]] = []
        self._alive: dict[int, int] = {}  # id of a storage -> its block
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    # --- What is alive ------------------------------------------------------------------------------------------

    def add(self, tensor: Tensor, part: PartName = "transient_peak", op: str = "") -> None:
        """Follows the storage of a tensor from now on, if it has one and is not followed yet."""
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive:
            return
        move = moving()
        on_host = stays_on_host(tensor) or (move is not None and move.source is None)
        block = self.birth(storage.nbytes(), part, op, on_host=on_host)
        if move is not None and move.source is not None:
            self.blocks[block].fetched = True
            if (source := self.block_of(move.source)) is not None:
                self.blocks[block].part = self.blocks[source].part  # a copy is what its original is
        self._alive[key] = block
        self._references[key] = weakref.ref(storage, partial(self._died, key))

    def birth(self, size: int, part: PartName, op: str, *, on_host: bool = False) -> int:
        """Notes that `size` bytes are alive from now on; returns the number of their block."""
        self.blocks.append(Block(size, part, self.phase, self.module, op, len(self.log), on_host=on_host))
        self.log.append(len(self.blocks) - 1)
        if not on_host:
            self.alive_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
        return len(self.blocks) - 1

    def death(self, number: int) -> None:
        """Notes that a block is gone."""
        block = self.blocks[number]
        block.died = len(self.log)
        self.log.append(~number)
        if not block.on_host:
            self.alive_bytes -= block.bytes

    def _died(self, key: int, _: object) -> None:
        del self._references[key]
        self.death(self._alive.pop(key))

    def tag(self, tensors: Iterable[Tensor | None], part: PartName) -> None:
        """Says what these tensors are, from their birth on."""
        for tensor in tensors:
            if tensor is not None and (number := self.block_of(tensor)) is not None:
                self.blocks[number].part = part

    def block_of(self, tensor: Tensor) -> int | None:
        """The number of a tensor's storage, if it is followed."""
        return self._alive.get(id(tensor.untyped_storage()))

    def saved_since(self, born: int) -> None:
        """Says that what was born since then and is still alive was kept for backward."""
        for block in self.blocks[bisect_left(self.blocks, born, key=lambda block: block.born) :]:
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
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_and_note(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            self.resized(storage)
            return storage

        torch.UntypedStorage.resize_ = resize_and_note
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # torch asks more often than it computes; its own way to the answer is long
        if any(issubclass(kind, _MADE_OF_OTHERS) for kind in types):
            return NotImplemented  # what they do with the tensors that they are made of comes here again
        if func.namespace in ("c10d", "_c10d_functional") and (sent := message(func, args)) is not None:
            self.messages.append((self.step, self.micro_step, self.phase, sent))
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.add(out, op=func.__name__)
        elif out is not None:
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self.add(leaf, op=func.__name__)
        return out

    # --- When: phases and modules -------------------------------------------------------------------------------

    def enter(self, phase: Phase, module: str = "") -> None:
        """Begins a phase, or the part of one that belongs to a module."""
        if (phase, module) != (self.phase, self.module):
            self.phase, self.module = phase, module
            self.marks.append(Mark(len(self.log), self.step, self.micro_step, phase, module))

    def _enter_backward(self, module: str) -> None:
        """Gradients that the loss makes of its head in forward are part of forward."""
        if self.phase in ("backward", "recompute"):
            self.enter("backward", module)

    @contextmanager
    def following(self, trained: Sequence[nn.Parameter]) -> Iterator[None]:
        """Follows inside what happens, by hooks: modules in forward by their calls, in backward by the
        gradients that arrive at them; gradients of parameters when they arrive and when they are accumulated."""

        def before(module: nn.Module, args: Any) -> None:
            if (path := self._modules.get(module)) is not None:
                self._stack.append((self.module, self.phase))
                inside: dict[Phase, Phase] = {"backward": "recompute", "optimizer": "forward", "load": "forward"}
                self.enter(inside.get(self.phase, self.phase), path)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if (path := self._modules.get(module)) is not None:
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
