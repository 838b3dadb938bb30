"""Notes what each operation of a traced step does, and to which part of the model that belongs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from moetune.adapt.attention import Capability
from moetune.adapt.build import Adapted
from moetune.memory.time.work import Done, Work, WorkPart, part_of, size_of, works, written_by


class Where(Protocol):
    """Who follows a step: where it is, and what it knows of tensors."""

    phase: Any
    step: int
    micro_step: int
    module: str

    def place(self) -> int:
        """The place in its log."""

    def is_host(self, tensor: Tensor) -> bool: ...

    def trains(self, tensor: Tensor) -> bool:
        """Whether it is a weight that trains."""

    def block_of(self, tensor: Tensor) -> int | None: ...


class Counter:
    """Counts the work of a GPU.

    Args:
        parts: module path -> its part.
        done: takes what is counted.
    """

    def __init__(self, capability: Capability, where: Where, parts: Mapping[str, WorkPart], done: list[Done]) -> None:
        self.capability, self.where, self.parts, self.done = capability, where, parts, done

    def count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """What an operation does, on the tensors that it was given and has returned."""
        written = written_by(func, args)
        part: WorkPart | None = "optimizer" if written is not None and self.where.trains(written) else None
        for work, tensor, own in works(func, args, kwargs, out, self.capability):
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
        """The part that runs now; an operation may say by itself that it is another one's."""
        if self.where.phase == "optimizer":
            return "optimizer"
        return part_of(func) or self.parts.get(self.where.module, "rest")

    def note(self, work: Work, part: WorkPart | None = None, of: Tensor | None = None) -> None:
        """Work that is done now; by default of the part whose module runs."""
        where = self.where
        if where.phase in ("load", "evaluation"):
            return
        once = where.phase == "optimizer"
        part = part or self.part()
        block = None if of is None else where.block_of(of)
        self.done.append(Done(where.place(), where.step, None if once else where.micro_step, part, work, block))


def work_parts(adapted: Adapted, named: Mapping[nn.Module, str]) -> dict[str, WorkPart]:
    """Module path -> its part, by what its parameters are; of what holds several, by the first of these that it holds:
    attention, experts, a plain MLP. A decoder layer itself adds residuals, and what stands outside of all is the
    loss."""
    components: dict[str, str] = {
        part.name.rpartition(".")[0]: part.component for part in adapted.run.structure.parameters
    }
    components |= {layer.experts: "experts" for layer in adapted.structure.moe_layers}
    parts: dict[str, WorkPart] = {"": "head_and_loss"}
    head = adapted.model.get_output_embeddings()
    for module, path in named.items():
        if module is head:  # which has no parameter of its own where it is tied
            parts[path] = "head_and_loss"
            continue
        inside = {one for owner, one in components.items() if f"{owner}.".startswith(f"{path}.")}
        parts[path] = _part_of(inside)
    of_attention = tuple(f"{path}." for path, part in parts.items() if part == "attention")
    return {path: "attention" if path.startswith(of_attention) else part for path, part in parts.items()}


def _part_of(components: Iterable[str]) -> WorkPart:
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
