"""`Counter`: records the GPU work of each operation of a traced step, by part of the model."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from moetune.adapt.attention import Capability
from moetune.adapt.build import Adapted
from moetune.memory.report import ONCE_PHASES
from moetune.memory.time.work import Done, Work, WorkPart, part_of, size_of, works, written_by


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
        capability, multiprocessors: the GPU's compute capability, which decides the kernels that run, and its number of
            multiprocessors (None: unknown).
        where: the current position in the traced step.
        parts: module path -> part of the step to which the module's work counts.
        done: list to which the work of each operation is appended.
    """

    def __init__(
        self,
        capability: Capability,
        multiprocessors: int | None,
        where: TracePosition,
        parts: Mapping[str, WorkPart],
        done: list[Done],
    ) -> None:
        self.capability, self.multiprocessors = capability, multiprocessors
        self.where, self.parts, self.done = where, parts, done

    def count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record the work of one operation, whose result is `out`.

        Updates of trained weights count as `optimizer`, copies between host and GPU as `transfers`, and operations on
        host tensors as `host`. Anything else counts as the part of the operation or of the module that runs.
        """
        if self.where.phase in ("load", "evaluation"):
            return
        written = written_by(func, args)
        part: WorkPart | None = "optimizer" if written is not None and self.where.trains(written) else None
        for work, tensor, own in works(func, args, kwargs, out, self.capability, self.multiprocessors):
            on_host = tensor is not None and self.where.is_host(tensor)
            if func._opname == "copy_" and on_host != self.where.is_host(args[1]):
                self.note(Work(copies=1, copied=size_of(args[0])), "transfers", tensor)
            elif on_host:
                self.note(
                    Work(flops32=work.flops + work.flops32, bytes=work.bytes + work.product_bytes), "host", tensor
                )
            else:
                self.note(work, part or own, tensor)

    def part(self, func: Any = None) -> WorkPart:
        """Return the part of the step to which an operator's work counts: `optimizer` in that phase, else the
        operator's own part (None: it has none), else that of the running module."""
        if self.where.phase == "optimizer":
            return "optimizer"
        return part_of(func) or self.parts.get(self.where.module, "rest")

    def note(self, work: Work, part: WorkPart | None = None, of: Tensor | None = None) -> None:
        """Record work at the current position; do nothing while weights are loaded or during evaluation.

        Args:
            part: the part to which the work counts; None: the part of the module that runs.
            of: a tensor whose storage belongs to the decoder layer that the work counts for; None if unknown.
        """
        where = self.where
        if where.phase in ("load", "evaluation"):
            return
        once = where.phase in ONCE_PHASES
        part = part or self.part()
        block = None if of is None else where.block_of(of)
        self.done.append(Done(where.place(), where.step, None if once else where.micro_step, part, work, block))


def work_parts(adapted: Adapted, named: Mapping[nn.Module, str]) -> dict[str, WorkPart]:
    """Return module path -> part of a step, from the kinds of parameters that each module holds.

    A module that holds attention and another kind, such as a decoder layer, is `rest` (residual additions). Any other
    module with several kinds counts as the first of: experts, router, shared or dense MLP, output head. All modules
    inside an attention module are `attention`. The path "", for work outside all modules, is `head_and_loss`. `named`
    maps the modules to classify to their paths.
    """
    components: dict[str, str] = {
        part.name.rpartition(".")[0]: part.component for part in adapted.run.structure.parameters
    }
    components |= {layer.experts: "experts" for layer in adapted.structure.moe_layers}
    parts: dict[str, WorkPart] = {"": "head_and_loss"}
    head = adapted.model.get_output_embeddings()
    for module, path in named.items():
        if module is head:  # a head with tied weights has no parameter of its own
            parts[path] = "head_and_loss"
            continue
        inside = {one for owner, one in components.items() if f"{owner}.".startswith(f"{path}.")}
        parts[path] = _part_of(inside)
    of_attention = tuple(f"{path}." for path, part in parts.items() if part == "attention")
    return {path: "attention" if path.startswith(of_attention) else part for path, part in parts.items()}


def _part_of(components: Iterable[str]) -> WorkPart:
    """Return the part of a module that holds parameters of these components; `rest` if none matches."""
    found = set(components) - {"norm", "other"}
    if "attention" in found and len(found) > 1:  # a whole layer
        return "rest"
    order: list[tuple[str, WorkPart]] = [
        ("attention", "attention"),
        ("experts", "experts"),
        ("router", "router"),
        ("shared_experts", "dense_mlp"),
        ("dense_mlp", "dense_mlp"),
        ("lm_head", "head_and_loss"),
    ]
    return next((part for component, part in order if component in found), "rest")
