"""Lines of a report that explain the peak: what is alive, bytes, docs page."""

import re
from collections.abc import Iterator

from moetune.memory.report import PartName, Term
from moetune.memory.trace.views import Trace

# Part of the peak -> the page in docs/concepts that explains it.
_PAGES: dict[PartName, str] = {
    "frozen_weights": "weights",
    "trainable_weights": "weights",
    "gradients": "optimizers",
    "optimizer_states": "optimizers",
    "master_weights": "optimizers",
    "saved_activations": "activations",
    "transient_peak": "activations",
}


def terms_of(traced: Trace) -> Iterator[Term]:
    """Yield the lines that explain the peak of a trace, largest first; within a part they sum to that part.

    Storages form a line if they belong to the same part and were made by the same operation in the same kind of module,
    in any layer.
    """
    lines: dict[tuple[PartName, str], list[int]] = {}
    alive = traced.alive()
    for number, size in zip(traced.events.like[alive].tolist(), traced.bytes[alive].tolist(), strict=True):
        block = traced.log.blocks[number]
        label = ": ".join(filter(None, (_kind(block.module), block.op))) or "of all layers"
        lines.setdefault((block.part, label), []).append(size)
    terms = (
        Term(part, name, f"{len(sizes):,} storages", sum(sizes), f"concepts/{_PAGES[part]}.md")
        for (part, name), sizes in lines.items()
    )
    yield from sorted((term for term in terms if term.bytes), key=lambda term: -term.bytes)


def _kind(module: str) -> str:
    """Return a module's path without the prefix up to the layer number, so that all layers have the same name."""
    return re.sub(r"(?:^|.*\.)\d+\.?", "", module)
