"""The peak, line by line: what is alive, by what it is and what made it. The lines of a part sum to that part."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from moetune.memory.allocator import WORKSPACES
from moetune.memory.arithmetic import STATES, STORED
from moetune.memory.closed_form.form import Evaluated
from moetune.memory.closed_form.sizes import Powers
from moetune.memory.report import PartName, Term
from moetune.memory.trace.log import Trace
from moetune.models.catalog.gpus import Gpu

_PAGES: dict[PartName, str] = {
    "frozen_weights": "weights",
    "trainable_weights": "weights",
    "gradients": "optimizer-states",
    "optimizer_states": "optimizer-states",
    "master_weights": "optimizer-states",
    "saved_activations": "activations",
    "transient_peak": "activations",
}


@dataclass(frozen=True)
class _Alive:
    """So many storages of these bytes each, made by one operation of one kind of module."""

    part: PartName
    module: str
    op: str
    bytes: int
    formula: str = ""


def terms_of_trace(traced: Trace) -> tuple[Term, ...]:
    """The peak of a trace."""
    alive = Counter(_Alive(b.part, _kind(b.module), b.op, b.bytes) for b in traced.alive(traced.peak))
    return _terms(alive.items(), {})


def beside_of_formula(found: Evaluated, card: Gpu) -> int:
    """Bytes that the allocator hands out beside what tensors ask for: workspaces, and sizes rounded up."""
    return WORKSPACES * card.cublas_workspace.value + found.peak.rounded - found.peak.total


def terms_of_formula(found: Evaluated) -> tuple[Term, ...]:
    """The peak by closed form, each line with its formula."""
    record, peak = found.record, found.peak
    alive: Counter[_Alive] = Counter()
    for (number, size), count in Counter(zip(peak.blocks.tolist(), peak.values.tolist(), strict=True)).items():
        kind = record.log.blocks[number]
        if kind.on_host:
            continue
        formula = _product(int(record.coefficients[number]), record.powers[record.monomials[number]])
        formula += "·n" if record.experts[number] >= 0 else ""
        alive[_Alive(kind.part, _kind(kind.module), kind.op, size, formula)] += count
    return _terms(alive.items(), found.sizes)


def _terms(alive: Iterable[tuple[_Alive, int]], sizes: dict[str, int]) -> tuple[Term, ...]:
    lines: dict[tuple[PartName, str], list[tuple[_Alive, int]]] = {}
    for one, count in alive:
        made = one.module if not one.op else f"{one.module}: {one.op}" if one.module else one.op
        lines.setdefault((one.part, made or "of all layers"), []).append((one, count))
    found = []
    for (part, name), ones in lines.items():
        ones.sort(key=lambda pair: -pair[0].bytes * pair[1])
        formulas = dict.fromkeys(_times(count, one.formula) for one, count in ones if one.formula)
        known = STORED.get(name.partition(", ")[2]) or STATES.get(name.partition(": ")[2])
        formula = known or " + ".join(list(formulas)[:3]) + (" + …" if len(formulas) > 3 else "")
        used = sorted({letter for one, _ in ones for letter in re.findall(r"[A-Za-z]\S*", one.formula)} & sizes.keys())
        numbers = ", ".join(f"{letter} = {sizes[letter]:,}" for letter in used) if not known else ""
        total = sum(one.bytes * count for one, count in ones)
        if total:
            numbers = numbers or f"{sum(count for _, count in ones):,} storages"
            found.append(Term(part, name, formula, numbers, total, f"concepts/{_PAGES[part]}.md"))
    return tuple(sorted(found, key=lambda term: -term.bytes))


def _kind(module: str) -> str:
    """A module's path without the number of its layer."""
    return re.sub(r"(?:^|.*\.)\d+\.?", "", module)


def _times(count: int, formula: str) -> str:
    return formula if count == 1 else f"{count:,} × {formula}"


def _product(coefficient: int, powers: Powers) -> str:
    exponents = {1: "", 2: "²"}
    factors = [f"{name}{exponents.get(exponent, f'^{exponent}')}" for name, exponent in powers]
    return "·".join([f"{coefficient:,}", *factors])
