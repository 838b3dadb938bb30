"""`Counter`: records the GPU work of each operation of a traced step, by part of the model."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from moetune.adapt.attention import Capability
from moetune.adapt.build import Adapted
from moetune.memory.phases import ONCE_PHASES
from moetune.memory.time.work import Done, Work, WorkPart, size_of, works, written_by


class TracePosition(Protocol):
    """The current position in a traced step and its tensors; `Tracker` implements this protocol.

    Attributes:
        phase: the current phase, such as `forward` or `optimizer`.
        step, micro_step: counted from 0.
        module: path of the module that runs; empty outside any module.

    Methods:
        place: number of entries in the trace's log (allocations and releases of storages) so far.
        is_host: whether a tensor is in host memory.
        trains: whether a tensor is a trained weight.
        block_of: index of a tensor's storage in the trace's log; None if the storage is not recorded.
    """

    phase: Any
    step: int
    micro_step: int
    module: str

    def place(self) -> int: ...

    def is_host(self, tensor: Tensor) -> bool: ...

    def trains(self, tensor: Tensor) -> bool: ...

    def block_of(self, tensor: Tensor) -> int | None: ...


class Counter:
    """Records the work that each operation would do on a GPU.

    Args:
        capability: the GPU's compute capability, which decides the kernels that run.
        where: the current position in the traced step.
        parts: module path -> part of the step to which the module's work counts.
        done: list to which the work of each operation is appended.
    """

    def __init__(
        self, capability: Capability, where: TracePosition, parts: Mapping[str, WorkPart], done: list[Done]
    ) -> None:
        self.capability, self.where, self.parts, self.done = capability, where, parts, done

    def count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record the work of one operation, whose result is `out`.

        Updates of trained weights count as `optimizer`, copies between host and GPU as `transfers`, operations on host
        tensors as `host`, and dequantization by itself. Anything else counts as the part of the module that runs.
        """
        if self.where.phase in ("load", "evaluation"):
            return
        written = written_by(func, args)
        part: WorkPart | None = "optimizer" if written is not None and self.where.trains(written) else None
        if part is None and func._opname.startswith("dequantize"):
            part = "dequantization"
        for work, tensor in works(func, args, kwargs, out, self.capability):
            on_host = tensor is not None and self.where.is_host(tensor)
            if func._opname == "copy_" and on_host != self.where.is_host(args[1]):
                self.note(Work(copied=size_of(args[0])), "transfers", tensor)
            elif on_host:
                self.note(Work(flops32=work.flops + work.flops32, bytes=work.bytes), "host", tensor)
            else:
                self.note(work, part, tensor)

    def part(self) -> WorkPart:
        """Return the part of the step to which work counts now: `optimizer` in that phase, else that of the running
        module."""
        return "optimizer" if self.where.phase == "optimizer" else self.parts.get(self.where.module, "rest")

    def note(self, work: Work, part: WorkPart | None = None, of: Tensor | None = None) -> None:
        """Record work at the current position; do nothing while weights are loaded or during evaluation.

        Args:
            part: the part to which the work counts; None: the part of the module that runs.
            of: a tensor whose storage belongs to the decoder layer that the work counts for; None if unknown.
        """
        where = self.where
        if where.phase in ("load", "evaluation"):
            return
        micro_step = None if where.phase in ONCE_PHASES else where.micro_step
        block = None if of is None else where.block_of(of)
        self.done.append(Done(where.place(), where.step, micro_step, part or self.part(), work, block))


_PARTS: Mapping[str, WorkPart] = {
    "attention": "attention",
    "experts": "experts",
    "router": "router",
    "shared_experts": "dense_mlp",
    "dense_mlp": "dense_mlp",
    "lm_head": "head_and_loss",
}
"""Component of a parameter -> part of a step; of a module with several components, the first decides."""


def work_parts(adapted: Adapted, named: Mapping[nn.Module, str]) -> dict[str, WorkPart]:
    """Return module path -> part of a step, from the kinds of parameters that each module holds (`_PARTS`).

    A module that holds attention and another kind, such as a decoder layer, is `rest` (residual additions). All modules
    inside an attention module are `attention`. The path "", for work outside all modules, is `head_and_loss`. `named`
    maps the modules to classify to their paths.
    """
    components = {part.name.rpartition(".")[0]: part.component for part in adapted.run.structure.parameters}
    components |= {layer.experts: "experts" for layer in adapted.structure.moe_layers}
    parts: dict[str, WorkPart] = {"": "head_and_loss"}
    head = adapted.model.get_output_embeddings()
    for module, path in named.items():
        inside = {component for owner, component in components.items() if f"{owner}.".startswith(f"{path}.")}
        inside = {"lm_head"} if module is head else inside - {"norm", "other"}  # a tied head has no parameter
        is_layer = "attention" in inside and len(inside) > 1
        parts[path] = "rest" if is_layer else next((_PARTS[one] for one in _PARTS if one in inside), "rest")
    of_attention = tuple(f"{path}." for path, part in parts.items() if part == "attention")
    return {path: "attention" if path.startswith(of_attention) else part for path, part in parts.items()}
