"""Lines of a report that explain the predicted peak: what is alive, its bytes, and their formula.

For stored weights and optimizer states the formulas are those of papers (docs/concepts/weights.md,
optimizers.md). They only explain the bytes; no prediction is computed from them. Sources:

- Mixed-precision Adam: 2 + 2 + 4 + 4 + 4 = 16 bytes per parameter, for weight, gradient, and in float32 the master copy
  and two moments (ZeRO, arXiv 1910.02054, section 3.1).
- LOMO (arXiv 2306.09782) keeps neither gradients nor optimizer states.
"""

import re
from collections.abc import Iterator

from moetune.formats.nf4 import Nf4
from moetune.formats.table import FORMATS
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
# How a weight is stored -> formula of its bytes; n: elements.
_STORED = {format.label: format.formula for format in (Nf4(double_quant=False), *FORMATS.values())}
# Optimizer -> formula of the bytes of its states; n: elements, b: bytes per element, [R, C]: shape of a matrix.
_STATES: dict[str, str] = {
    "adamw": "2·b·n: two moments in the dtype that is updated",
    "paged_adamw": "8·n: two float32 moments",
    "adamw8bit": "2·(n + 4·⌈n/256⌉); 8·n for tensors below 4,096 elements",
    "paged_adamw8bit": "2·(n + 4·⌈n/256⌉); 8·n for tensors below 4,096 elements",
    "lion8bit": "n + 4·⌈n/256⌉; 4·n for tensors below 4,096 elements",
    "ademamix8bit": "3·(n + 4·⌈n/256⌉); 12·n for tensors below 4,096 elements",
    "adafactor": "4·(R + C) a matrix [R, C]; 4·n for vectors",
    "adalomo": "4·(R + C) a matrix [R, C]; 4·n for vectors",
    "sgd": "b·n: momentum",
    "lomo": "0",
}


def terms_of(traced: Trace) -> Iterator[Term]:
    """Yield the lines that explain the peak of a trace, largest first; within a part they sum to that part.

    Storages form a line if they belong to the same part and were made by the same operation in the same kind of module,
    in any layer. Lines of weights and optimizer states have a formula.
    """
    lines: dict[tuple[PartName, str], list[int]] = {}
    alive = traced.alive()
    for number, size in zip(traced.events.like[alive].tolist(), traced.bytes[alive].tolist(), strict=True):
        block = traced.log.blocks[number]
        made = ": ".join(filter(None, (_kind(block.module), block.op))) or "of all layers"
        lines.setdefault((block.part, made), []).append(size)
    terms = (_term(part, name, sizes) for (part, name), sizes in lines.items())
    yield from sorted((term for term in terms if term.bytes), key=lambda term: -term.bytes)


def _term(part: PartName, name: str, sizes: list[int]) -> Term:
    """Return the line of the storages that `name` made, whose formula is looked up in `_STORED` and `_STATES`."""
    formula = _STORED.get(name.partition(", ")[2]) or _STATES.get(name.partition(": ")[2]) or ""
    return Term(part, name, formula, f"{len(sizes):,} storages", sum(sizes), f"concepts/{_PAGES[part]}.md")


def _kind(module: str) -> str:
    """Return a module's path without the prefix up to the layer number, so that all layers have the same name."""
    return re.sub(r"(?:^|.*\.)\d+\.?", "", module)
