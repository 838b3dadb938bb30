"""The closed form: what a run file's model, gradients, optimizer and activations take, in milliseconds.

Weights, gradients, optimizer states and master weights are sums over tensors, exact to the byte. Activations come from
the layers' tapes (activations.py). docs/concepts/{weights,optimizer-states,activations}.md tell the formulas.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from moetune.anatomy.selection import Selection, select
from moetune.config import Part, RunConfig
from moetune.experts.packed import BLOCK, NESTED_BLOCK
from moetune.memory.activations import LayerTape
from moetune.memory.facts import Experts, Facts, LayerFacts, Parameter, split_heads
from moetune.memory.head import Head, head_lora
from moetune.memory.layer_plan import Exchanged, LayerPlan, Run
from moetune.memory.optimizers import PartOptimizers
from moetune.memory.quantities import Exchange, Layer, Matrix, Quantities, Split, Tensors, Transient, total
from moetune.memory.routing import BALANCED, Routing
from moetune.parallel.place import Place
from moetune.parallel.placement import place_experts, read_load
from moetune.step.optimizers import refuse_parts_without

_SMALLEST_8BIT = 4096  # bitsandbytes keeps states of tensors with fewer elements in float32
_BLOCK_8BIT = 256  # elements that share one float32 scale of a state
_CODE, _NESTED_CODE = 16 * 4, 256 * 4  # bytes of NF4's levels and of the 8-bit levels of its scales


# --- Weights ------------------------------------------------------------------------------------------------------


def packed_bytes(out: int, into: int, base: str, nested: bool) -> int:
    """Bytes of one matrix [out, into] in base precision, without tables that matrices share.

    n = out·into weights take, in nf4, n/2 + 4·⌈n/64⌉ (QLoRA, arXiv 2305.14314), with double quantization
    n/2 + ⌈n/64⌉ + 4·⌈n/64/256⌉ + 4; in int8 n + 4·out; in bf16 and fp32 2·n and 4·n.
    """
    n = out * into
    blocks = -(-n // BLOCK)
    match base:
        case "nf4":
            scales = blocks + 4 * -(-blocks // NESTED_BLOCK) + 4 if nested else 4 * blocks
            return -(-n // 2) + scales
        case "int8":
            return n + 4 * out
    return {"bf16": 2, "fp32": 4}[base] * n


def _linear_bytes(out: int, into: int, base: str, nested: bool) -> int:
    """A packed linear layer: its matrix, and for nf4 the tables of levels that bitsandbytes keeps with it."""
    tables = _CODE + _NESTED_CODE * nested if base == "nf4" else 0
    return packed_bytes(out, into, base, nested) + tables


# --- The run ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """A run file on a model: what the formulas read, and what trains in each layer."""

    facts: Facts
    config: RunConfig
    selection: Selection
    run: Run
    plans: tuple[LayerPlan, ...]
    outside: frozenset[str]
    loss_width: int | None
    routing: Routing = BALANCED
    held: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Ids of the experts of a layer that are here; layers left out have all."""

    @property
    def accumulating(self) -> bool:
        """Whether a gradient joins what is there as it comes. FSDP2 takes those of a layer away when all are made."""
        parallel = self.config.parallel
        return self.config.train.accumulate > 1 and (parallel.fsdp == 1 or parallel.zero == 1)

    @property
    def optimizers(self) -> PartOptimizers:
        return PartOptimizers.of(self.config)

    @functools.cached_property
    def placed(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """By layer, the experts of each `ep` rank."""
        parallel = self.config.parallel
        load = None if parallel.load is None else read_load(parallel.load, "parallel.load")
        return place_experts(self.facts.anatomy, self.selection, parallel.ep, load) if parallel.ep > 1 else {}

    def at(self, place: Place) -> Setup:
        """What the rank at a place has of each layer: its heads and its experts. All ranks send what this one sends."""
        parallel, layers, plans = self.config.parallel, list[LayerFacts](), list[LayerPlan]()
        held = {index: of_ranks[place.ep] for index, of_ranks in self.placed.items()}
        for index, (layer, plan) in enumerate(zip(self.facts.layers, self.plans, strict=True)):
            layers.append(split_heads(layer, parallel.tp) if parallel.tp > 1 else layer)
            plans.append(self._plan_at(index, plan, held[index]) if index in held else plan)
        return replace(self, facts=replace(self.facts, layers=tuple(layers)), plans=tuple(plans), held=held)

    def _plan_at(self, index: int, plan: LayerPlan, held: tuple[int, ...]) -> LayerPlan:
        moe, parallel = self.facts.layers[index].experts, self.config.parallel
        assert moe is not None
        tokens = self.run.batch * self.run.sequence // parallel.tp
        leaving = self.routing.rows(index, tokens, moe.top_k, moe.shape.num_experts)
        here = [leaving[expert] * parallel.ep for expert in held]
        return replace(
            plan,
            experts=len(set(held) & set(self.selection.experts.get(index, ()))),
            lora_experts=len(set(held) & set(self.selection.lora_experts.get(index, ()))),
            rows=max(here),
            exchange=Exchanged(
                tokens, sum(here), len(held), bool(plan.experts or plan.lora_experts), sliced=parallel.tp > 1
            ),
        )


def set_up(
    facts: Facts,
    config: RunConfig,
    *,
    width: int | None = None,
    routing: Routing = BALANCED,
    loss_width: int | None = None,
) -> Setup:
    """Resolves a run file.

    Args:
        width: bytes of the compute dtype; by default that of `model.dtype`, where `auto` is bf16.
        routing: how many tokens each expert receives.
        loss_width: None for moetune's loss; else that of torch's `cross_entropy`, in so many bytes an element.

    Raises:
        UserError: the run file asks for what the model does not have.
    """
    width = width or {"bf16": 2, "fp16": 2, "fp32": 4, "auto": 2}[config.model.dtype]
    selection = select(config.adapt, facts.anatomy)
    routers = {part.name for part in facts.anatomy.parts_of("router")}
    trained: dict[Part, int] = {
        "router": len(selection.full & routers),
        "experts": sum(map(len, selection.experts.values())),
        "lora": len(selection.lora_linears) + sum(map(len, selection.lora_experts.values())),
        "other": len(selection.full - routers),
    }
    refuse_parts_without(config, trained)
    lora = selection.lora
    run = Run(
        width=width,
        base=config.model.base,
        nested=config.model.double_quant,
        rank=lora.rank if lora else 1,
        split=bool(lora and lora.gate_up == "split"),
        batch=config.train.micro_batch,
        sequence=config.train.sequence_length,
        eager=config.model.attention == "eager",
        checkpointed=config.train.checkpointing in ("full", "offload"),
        on_host=config.model.experts_on == "host",
        keeps_rows=config.train.checkpointing == "none",
        optimizers=PartOptimizers.of(config),
    )
    full, outside = _by_layer(selection.full, facts)
    factors, _ = _by_layer(selection.lora_linears, facts)
    # Under checkpointing transformers lets gradients reach the embedding's output, whatever trains.
    needs = facts.embedding in outside or run.checkpointed
    plans = []
    for index, layer in enumerate(facts.layers):
        moe = layer.experts
        plan = LayerPlan(
            full=full.get(index, frozenset()),
            lora=factors.get(index, frozenset()),
            experts=len(selection.experts.get(index, ())),
            lora_experts=len(selection.lora_experts.get(index, ())),
            input_needs=needs,
            rows=0 if moe is None else _rows(routing, index, run.batch * run.sequence, moe),
            # A frozen embedding's output stays: autograd holds on to leaves.
            offloads=config.train.checkpointing == "offload" and (index > 0 or facts.embedding in outside),
        )
        plans.append(plan)
        needs = needs or bool(plan.full or plan.lora or plan.experts or plan.lora_experts)
    return Setup(facts, config, selection, run, tuple(plans), outside, loss_width, routing)


def _rows(routing: Routing, layer: int, tokens: int, moe: Experts) -> int:
    return max(routing.rows(layer, tokens, moe.top_k, moe.shape.num_experts))


def _by_layer(names: Iterable[str], facts: Facts) -> tuple[Mapping[int, frozenset[str]], frozenset[str]]:
    """Layer -> ends of the names there; and the names outside of layers."""
    layers: dict[int, set[str]] = {}
    outside = set()
    for name in names:
        if name.startswith(facts.prefix):
            index, _, end = name[len(facts.prefix) :].partition(".")
            layers.setdefault(int(index), set()).add(end)
        else:
            outside.add(name)
    return {index: frozenset(ends) for index, ends in layers.items()}, frozenset(outside)


# --- Tensors of a layer -------------------------------------------------------------------------------------------


Group = tuple[str, Tensors]
"""What a tensor is part of, and what it takes."""


def dense_groups(layer: LayerFacts, plan: LayerPlan, run: Run, optimizers: PartOptimizers) -> list[Group]:
    """The tensors of a layer but those of its routed experts."""
    groups: list[Group] = [("buffers", Tensors(frozen=layer.buffers))]
    groups += [(p.component, _parameter(p, p.name in plan.full, layer, run, optimizers)) for p in layer.parameters]
    for path in sorted(plan.lora):
        linear = layer.linears[path]
        groups += [("lora", optimizers.trained("lora", (run.rank, side), 4)) for side in (linear.into, linear.out)]
    if layer.experts is not None and run.base == "nf4" and run.nested:
        tables = 2 * _NESTED_CODE  # one a stack
        groups.append(("experts", Tensors(host=tables) if run.on_host else Tensors(frozen=tables, packed=tables)))
    return groups


def outside_groups(setup: Setup) -> list[Group]:
    """The tensors before the first and after the last layer."""
    run, optimizers = setup.run, setup.optimizers
    groups: list[Group] = [("buffers", Tensors(frozen=setup.facts.buffers))]
    for p in setup.facts.outside:
        width = p.width or run.width
        trains = p.name in setup.outside
        frozen = Tensors(frozen=p.numel * width, frozen_numel=p.numel)
        groups.append((p.component, optimizers.trained("other", p.shape, width) if trains else frozen))
    for _ in head_lora(setup):
        sides = (setup.facts.hidden, setup.facts.vocabulary)
        groups += [("lora", optimizers.trained("lora", (run.rank, side), 4)) for side in sides]
    return groups


def _parameter(p: Parameter, trains: bool, layer: LayerFacts, run: Run, optimizers: PartOptimizers) -> Tensors:
    width = p.width or run.width
    if trains:
        return optimizers.trained("router" if p.component == "router" else "other", p.shape, width)
    path, _, end = p.name.rpartition(".")
    linear = layer.linears.get(path)
    if linear is not None and end == "weight" and is_packed(linear.packable, run):
        nbytes = _linear_bytes(linear.out, linear.into, run.base, run.nested)
        return Tensors(frozen=nbytes, packed=nbytes, frozen_numel=p.numel)
    return Tensors(frozen=p.numel * width, frozen_numel=p.numel)


def is_packed(packable: bool, run: Run) -> bool:
    """Whether a frozen linear layer is stored otherwise than it computes."""
    return packable and {"bf16": 2, "fp32": 4}.get(run.base) != run.width


def expert_tensors(
    moe: Experts, plan: LayerPlan, run: Run, optimizers: PartOptimizers
) -> tuple[Tensors, Tensors, Tensors]:
    """(a frozen expert, one with LoRA, one that trains whole)."""
    shape = moe.shape
    rows = shape.intermediate * (2 if shape.has_gate else 1)
    matrices = ((rows, shape.hidden), (shape.hidden, shape.intermediate))
    biases = (rows, shape.hidden) if shape.has_bias else ()
    nbytes = sum(packed_bytes(*matrix, run.base, run.nested) for matrix in matrices)
    here = sum(biases) * run.width + (0 if run.on_host else nbytes)
    frozen = Tensors(
        frozen=here,
        packed=here,
        frozen_numel=sum(biases) if run.on_host else shape.parameters_per_expert,
        host=nbytes if run.on_host else 0,
    )
    sizes = (*matrices, *((size,) for size in biases))
    whole = total(optimizers.trained("experts", size, run.width) for size in sizes)
    parts, n = (2 if run.split and shape.has_gate else 1), plan.lora_experts
    factors = (
        (parts, run.rank, shape.hidden),
        (parts, rows // parts, run.rank),
        (1, run.rank, shape.intermediate),
        (1, shape.hidden, run.rank),
    )
    lora = total(optimizers.trained("lora", factor, 4, stacked=max(n, 1)) for factor in factors)
    lora, whole = (
        replace(lora, alone=0, leaving=0),
        replace(whole, alone=0, leaving=0),
    )  # part of the experts' backward (experts.py)
    return frozen, frozen + lora, whole


@functools.lru_cache(maxsize=4096)
def _layer(
    facts: LayerFacts,
    plan: LayerPlan,
    run: Run,
    optimizers: PartOptimizers,
    whole_ids: tuple[int, ...],
    lora_ids: tuple[int, ...],
) -> Layer:
    """The layer's tensors."""
    dense = total(tensors for _, tensors in dense_groups(facts, plan, run, optimizers))
    matrices = _matrices(facts, plan, run)
    if facts.experts is None:
        return Layer(0, dense, (), 0, (), matrices=matrices)
    frozen, lora, whole = expert_tensors(facts.experts, plan, run, optimizers)
    experts = [frozen] * facts.experts.shape.num_experts
    for expert in lora_ids:
        experts[expert] = lora
    for expert in whole_ids:
        experts[expert] = whole
    return Layer(0, dense, tuple(experts), 0, (), matrices=matrices, bank=_bank(facts.experts, plan, run))


def _matrices(facts: LayerFacts, plan: LayerPlan, run: Run) -> tuple[Matrix, ...]:
    """The parameters of a layer but those of its routed experts, and but what is packed."""
    found = []
    for p in facts.parameters:
        path, _, end = p.name.rpartition(".")
        linear, trains = facts.linears.get(path), p.name in plan.full
        if trains or linear is None or end != "weight" or not is_packed(linear.packable, run):
            found.append(_matrix(p, run, trains))
    for path in sorted(plan.lora):
        linear = facts.linears[path]
        found += [Matrix(run.rank, 4 * linear.into, True), Matrix(linear.out, 4 * run.rank, True)]
    return tuple(found)


def _matrix(p: Parameter, run: Run, trains: bool) -> Matrix:
    return Matrix(p.shape[0], math.prod(p.shape[1:]) * (p.width or run.width), trains)


def _bank(moe: Experts, plan: LayerPlan, run: Run) -> tuple[Matrix, ...]:
    """The parameters of the routed experts that are here: whole ones one by one, low-rank factors in stacks."""
    shape, b = moe.shape, run.width
    rows = shape.intermediate * (2 if shape.has_gate else 1)
    whole = [Matrix(rows, shape.hidden * b, True), Matrix(shape.hidden, shape.intermediate * b, True)]
    whole += [Matrix(rows, b, True), Matrix(shape.hidden, b, True)] if shape.has_bias else []
    parts = 2 if run.split and shape.has_gate else 1
    sides = (parts * shape.hidden, rows, shape.intermediate, shape.hidden) if plan.lora_experts else ()
    return tuple(whole * plan.experts) + tuple(Matrix(plan.lora_experts, 4 * run.rank * side, True) for side in sides)


@dataclass(frozen=True)
class _Activations:
    saved: int
    offloaded: int
    experts_return: bool
    split: Split
    moments: tuple[tuple[Transient, int], ...]


@functools.lru_cache(maxsize=4096)
def _activations(
    facts: LayerFacts, plan: LayerPlan, run: Run, family: str, hidden: int, accumulating: bool
) -> _Activations:
    """What the layer's forward pass keeps, and the fullest moment of each part of its backward with its bytes of
    gradients."""
    layer = LayerTape(facts, plan, run, family, hidden)
    kept = layer.saved()
    saved = layer.tape.nbytes(kept)
    moments = []
    for m in layer.moments(accumulating):
        own = 0 if run.checkpointed else m.saved
        transient = Transient(
            m.where,
            m.alive - own - m.rows,
            m.rows,
            saved=1.0 if run.checkpointed or not saved else m.saved / saved,
            recomputes=run.checkpointed and m.node < 0,
            has_input=m.node < 0 or layer.keeps_input,
        )
        moments.append((transient, m.gradients))
    offloaded = layer.input.bytes if plan.offloads else 0
    return _Activations(saved, offloaded, layer.experts_return, layer.split, tuple(moments))


# --- All of it ----------------------------------------------------------------------------------------------------


def quantities(
    facts: Facts,
    config: RunConfig,
    *,
    width: int | None = None,
    routing: Routing = BALANCED,
    loss_width: int | None = None,
) -> Quantities:
    """The closed form of a run: arguments as in `set_up`."""
    return quantities_of(set_up(facts, config, width=width, routing=routing, loss_width=loss_width))


def quantities_of(setup: Setup) -> Quantities:
    """The closed form of a run file that is resolved."""
    facts, run, config = setup.facts, setup.run, setup.config
    head = Head(setup)
    embedding, after = _outside(setup)
    # A tied table's gradient comes from the head and waits for the embedding's.
    waiting = embedding.trainable if facts.tied else 0
    outside: list[tuple[Matrix, str]] = [(_matrix(p, run, p.name in setup.outside), p.component) for p in facts.outside]
    for _ in head_lora(setup):
        low = Matrix(run.rank, 4 * facts.hidden, True), Matrix(facts.vocabulary, 4 * run.rank, True)
        outside += [(matrix, "lora") for matrix in low]
    layers = []
    for index, plan in enumerate(setup.plans):
        whole_ids, lora_ids = setup.selection.experts.get(index, ()), setup.selection.lora_experts.get(index, ())
        layer = _layer(facts.layers[index], plan, run, setup.optimizers, whole_ids, lora_ids)
        if index in setup.held:
            layer = replace(layer, experts=tuple(layer.experts[expert] for expert in setup.held[index]))
        kept = _activations(facts.layers[index], plan, run, facts.family, facts.hidden, setup.accumulating)
        own = layer.tensors.gradients
        transients = tuple(
            replace(moment, dense=moment.dense + waiting, gradients=gradients / own if own else 0.0)
            for moment, gradients in kept.moments
            if run.checkpointed or "forward" not in moment.name or index == len(setup.plans) - 1
        )
        layers.append(
            replace(
                layer,
                index=index,
                exchange=_exchange(facts.layers[index], plan, run, facts.hidden),
                saved=kept.saved,
                transients=transients,
                offloaded=kept.offloaded,
                returns=kept.experts_return,
                split=kept.split if config.parallel.tp > 1 else None,
            )
        )
    hidden = run.batch * run.sequence * facts.hidden * run.width
    return Quantities(
        embedding=embedding,
        layers=tuple(layers),
        head=after,
        batch=head.nbytes(head.batch()),
        saved=head.nbytes(head.saved()),
        loss=head.nbytes(head.loss()),
        # A tied table's second gradient is whole beside the first, and then their sum.
        embedding_backward=hidden + (2 * facts.vocabulary * facts.hidden * run.width if waiting else 0),
        hidden=hidden,
        accumulate=config.train.accumulate,
        tied=facts.tied,
        evaluation=0 if (held_out := evaluation_of(setup)) is None else held_out.nbytes(held_out.evaluation()),
        table=tuple(matrix for matrix, component in outside if component == "embedding"),
        norm=tuple(matrix for matrix, component in outside if component == "norm"),
        tail=tuple(matrix for matrix, component in outside if component not in ("embedding", "norm")),
    )


def _exchange(facts: LayerFacts, plan: LayerPlan, run: Run, hidden: int) -> Exchange | None:
    """What others' experts are sent in one direction: all rows less those that stay."""
    if plan.exchange is None or facts.experts is None:
        return None
    tokens, arriving, held, _, _ = plan.exchange
    ep = facts.experts.shape.num_experts // held
    kept = arriving // ep  # every rank sends as many as this one
    counts = 8 * facts.experts.shape.num_experts * (ep - 1) // ep
    return Exchange(
        (tokens * facts.experts.top_k - kept) * hidden * run.width, (arriving - kept) * hidden * run.width, counts
    )


def evaluation_of(setup: Setup) -> Head | None:
    """The head on a batch of held-out data, if that has more rows than one that trains."""
    data, train = setup.config.data, setup.config.train
    rows = train.eval_micro_batch or train.micro_batch
    if data is None or data.eval is None or rows <= train.micro_batch:
        return None
    config = setup.config.model_copy(update={"train": train.model_copy(update={"accumulate": 1})})
    return Head(replace(setup, config=config, run=replace(setup.run, batch=rows)))


def _outside(setup: Setup) -> tuple[Tensors, Tensors]:
    """(embedding, head): parameters before the first and after the last layer."""
    groups = outside_groups(setup)
    before = total(tensors for component, tensors in groups if component in ("embedding", "buffers"))
    after = total(tensors for component, tensors in groups if component not in ("embedding", "buffers"))
    return before, after
