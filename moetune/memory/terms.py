"""The closed form, line by line: what takes how much at the peak, with its formula and the numbers put in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from moetune.memory.activations import LayerTape
from moetune.memory.formulas import Setup, dense_groups, evaluation_of, expert_tensors, outside_groups, quantities_of
from moetune.memory.head import Head
from moetune.memory.layer_plan import Run
from moetune.memory.optimizers import STATE_FORMULAS
from moetune.memory.quantities import Quantities, Tensors
from moetune.memory.report import PartName, Term
from moetune.memory.tape import Piece, Tape

_WEIGHTS, _STATES, _ACTIVATIONS, _LOSS = (
    f"concepts/{page}.md" for page in ("weights", "optimizer-states", "activations", "loss")
)  # fmt: skip

_OFFLOAD = "concepts/offload.md"

_PACKED = {
    "nf4": "n/2 + 4·⌈n/64⌉ a matrix of n weights",
    "nf4, double-quantized": "n/2 + ⌈n/64⌉ + 4·⌈n/64/256⌉ + 4 a matrix of n weights",
    "int8": "n + 4·rows a matrix of n weights",
    "bf16": "2·n",
    "fp32": "4·n",
}


@dataclass(frozen=True)
class _Line:
    part: PartName
    name: str
    formula: str
    numbers: str
    page: str


def terms(setup: Setup) -> tuple[Term, ...]:
    """Every line of the closed form at its peak; those of a part sum to that part of `quantities_of(setup).peak()`."""
    q = quantities_of(setup)
    where, parts = q.peak()
    lines: Counter[_Line] = Counter()
    _weights(setup, lines)
    _gradients(setup, q, where, parts.gradients, lines)
    _activations(setup, q, where, lines)
    copies = _Line("frozen_weights", "experts in use and next, from the host", _PACKED[_base(setup.run)], "", _OFFLOAD)
    lines[copies] += parts.frozen_weights - q.tensors.frozen
    made = tuple(Term(k.part, k.name, k.formula, k.numbers, n, k.page) for k, n in lines.items() if n)
    assert all(sum(t.bytes for t in made if t.part == name) == value for name, value in parts.items()), where
    return made


# --- Weights, states, master copies -------------------------------------------------------------------------------


def _weights(setup: Setup, lines: Counter[_Line]) -> None:
    run = setup.run
    base = _base(run)
    groups: Counter[tuple[str, Tensors]] = Counter()
    for component, tensors in outside_groups(setup):
        groups[component, tensors] += 1
    for (layer, plan), count in Counter(zip(setup.facts.layers, setup.plans, strict=True)).items():
        for component, tensors in dense_groups(layer, plan, run, setup.optimizers):
            groups[component, tensors] += count
        if layer.experts is not None:
            kinds = expert_tensors(layer.experts, plan, run, setup.optimizers)
            frozen = layer.experts.shape.num_experts - plan.experts - plan.lora_experts
            for tensors, n in zip(kinds, (frozen, plan.lora_experts, plan.experts), strict=True):
                groups["experts", tensors] += n * count
    named = setup.config.optimizers
    numels: Counter[_Line] = Counter()
    for (component, t), count in groups.items():
        owner = component if component in ("router", "experts", "lora") else "other"
        optimizer = named[owner].name if owner in named else ""
        how, stored = (_PACKED[base], base) if t.packed else ("width·n", "not packed")
        lines_of: tuple[tuple[PartName, str, str, str, int, int], ...] = (
            ("frozen_weights", f"{component}, {stored}", how, _WEIGHTS, t.frozen, t.frozen_numel),
            ("trainable_weights", f"{component}, trained", "width·n", _WEIGHTS, t.trainable, t.numel),
            (
                "optimizer_states",
                f"{component}: {optimizer}",
                STATE_FORMULAS.get(optimizer, ""),
                _STATES,
                t.states,
                t.numel,
            ),
            ("master_weights", f"{component}: float32 copies", "4·n", _STATES, t.master, t.numel),
        )
        for part, name, formula, page, nbytes, numel in lines_of:
            line = _Line(part, name, formula, "", page)
            lines[line] += count * nbytes
            numels[line] += count * numel
    for line, numel in numels.items():
        if numel:
            lines[replace(line, numbers=f"n = {numel:,}")] += lines.pop(line)


def _base(run: Run) -> str:
    return "nf4, double-quantized" if run.base == "nf4" and run.nested else run.base


def _gradients(setup: Setup, q: Quantities, where: str, there: int, lines: Counter[_Line]) -> None:
    """With accumulation all gradients are there from the second micro-step on, beside those that are being made."""
    earlier = q.tensors.gradients if setup.config.train.accumulate > 1 else 0
    n = f"n = {q.tensors.numel:,}"
    lines[_Line("gradients", "gradients of earlier micro-steps", "Σ width·n", n, _STATES)] += earlier
    alone = _Line("gradients", "the largest gradient, in its update", "width·n, and what the update takes", "", _STATES)
    lines[alone] += _alone(q, where)
    earlier += lines[alone]
    made = _Line("gradients", "gradients made so far", "Σ width·n", f"of {n}", _STATES)
    lines[made] += there - earlier


def _alone(q: Quantities, where: str) -> int:
    """What of the peak is a gradient that is used up as it comes, with its update."""
    if where.startswith("layer"):
        index, _, moment = where.removeprefix("layer ").partition(": ")
        return q.layers[int(index)].used_up(moment)
    return {"head": q.head.alone, "embedding": q.embedding.alone}.get(where, 0)


# --- Activations --------------------------------------------------------------------------------------------------


def _activations(setup: Setup, q: Quantities, where: str, lines: Counter[_Line]) -> None:
    if where == "evaluation" and (held_out := evaluation_of(setup)) is not None:
        _add(lines, "transient_peak", held_out.evaluation(), held_out.tape, 1)
        return
    head = Head(setup)
    _add(lines, "saved_activations", head.batch(), head.tape, 1)
    if where == "loss":
        _add(lines, "saved_activations", head.saved(), head.tape, 1)
        _add(lines, "transient_peak", head.loss(), head.tape, 1)
        _add_layers(setup, len(q.layers), lines)
    elif where == "head":
        _add_layers(setup, len(q.layers), lines)
    elif where == "optimizer":
        update = _Line("transient_peak", "one update: float32 copies, blocks", "4·n or 8·n of one tensor", "", _STATES)
        lines[update] += q.tensors.update
    elif where == "embedding":
        lines[_Line("transient_peak", "the embedding's backward", "T·H·b", "", _ACTIVATIONS)] += q.embedding_backward
    elif where.startswith("layer"):
        number, _, part = where.removeprefix("layer ").partition(": ")
        _add_layers(setup, int(number), lines)
        _add_peak_layer(setup, q, int(number), part, lines)


def _add_layers(setup: Setup, count: int, lines: Counter[_Line]) -> None:
    """What the first `count` layers keep."""
    alike = Counter(zip(setup.facts.layers[:count], setup.plans[:count], strict=True))
    for (facts, plan), number in alike.items():
        layer = LayerTape(facts, plan, setup.run, setup.facts.family, setup.facts.hidden)
        _add(lines, "saved_activations", layer.saved(), layer.tape, number)


def _add_peak_layer(setup: Setup, q: Quantities, index: int, part: str, lines: Counter[_Line]) -> None:
    facts, plan = setup.facts, setup.plans[index]
    layer = LayerTape(facts.layers[index], plan, setup.run, facts.family, facts.hidden)
    moment = next(m for m in layer.moments(setup.accumulating) if m.where == part)
    kept, others = layer.alive_at(moment, setup.accumulating)
    _add(lines, "saved_activations", layer.saved() if setup.run.checkpointed else kept, layer.tape, 1)
    _add(lines, "transient_peak", others, layer.tape, 1)
    at = next(t for t in q.layers[index].transients if t.name == part)
    back = _Line("saved_activations", "layers' inputs, back from the host", "T·H·b each", "", _OFFLOAD)
    lines[back] += q.fetched(q.layers[index], at).inputs
    if facts.tied and q.embedding.numel:
        tied = _Line("transient_peak", "the tied table's gradient, which waits", "V·H·b", "", _ACTIVATIONS)
        lines[tied] += q.embedding.trainable


def _add(lines: Counter[_Line], part: PartName, pieces: Iterable[Piece], tape: Tape, layers: int) -> None:
    for piece in pieces:
        times = f"{layers} layers × " if layers > 1 else ""
        values = "·".join(str(tape.letters.get(factor, factor)) for factor in piece.shape.split("·"))
        name = f"{piece.where or 'layer'}: {piece.label}"
        page = _LOSS if piece.where == "head" else _ACTIVATIONS
        line = _Line(part, name, f"{piece.shape}·{piece.width}", f"{times}{values}·{piece.width}", page)
        lines[line] += layers * tape.nbytes([piece])
