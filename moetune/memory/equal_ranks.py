"""Groups of ranks with equal memory, of which one rank is predicted."""

from collections.abc import Hashable

from moetune.adapt.build import build
from moetune.memory.trace.alike import kinds_of
from moetune.parallel.coordinates import Coordinates, token_shares
from moetune.run.resolve import AnyRun, ResolvedRun, resolve


def kinds_of_ranks(run: AnyRun, *, by_expert: bool) -> list[Hashable]:
    """Return one key per rank, in rank order; ranks with equal keys need equal memory.

    A key holds the rank's stage of the pipeline; how the rank's experts of each layer train; the rank's shard if some
    trained tensor does not divide evenly among the FSDP ranks; its `tp` index if the tokens do not divide evenly among
    the tensor-parallel ranks; and with `by_expert` its `ep` index, because experts then receive different numbers of
    tokens.
    """
    run = resolve(run, "cuda")
    parallel = run.config.parallel
    if parallel.ranks == 1:
        return [()]
    is_even, experts = divides_evenly(run), [_experts_at(run, ep) for ep in range(parallel.ep)]
    shares_evenly = run.config.train.micro_batch * run.config.train.sequence_length % token_shares(parallel) == 0
    kinds: list[Hashable] = []
    for rank in range(parallel.ranks):
        at = Coordinates.of(parallel, rank)
        shard = () if is_even else (at.fsdp, at.shard)
        kinds.append((at.pp, experts[at.ep], shard, at.ep if by_expert else 0, 0 if shares_evenly else at.tp))
    return kinds


def _experts_at(run: ResolvedRun, ep: int) -> Hashable:
    """Return, for each layer whose experts are divided, how many of those at index `ep` train in full, and whether each
    other one, in order, has LoRA. Only neighbours of one kind are computed together (`groups_of`)."""
    layers = []
    for layer, of_ranks in run.placement.items():
        both = run.selection.experts, run.selection.lora_experts
        trained, lora = (frozenset(chosen.get(layer, ())) for chosen in both)
        if trained or lora:
            others = tuple(expert in lora for expert in of_ranks[ep] if expert not in trained)
            layers.append((len(of_ranks[ep]) - len(others), others))
    return tuple(layers)


def divides_evenly(run: ResolvedRun) -> bool:
    """Return whether every trained tensor divides evenly among the FSDP ranks.

    A frozen tensor takes equal memory on all of them whether it does or not: FSDP2 pads the shards. The states of an
    optimizer are not padded.
    """
    parallel = run.config.parallel
    if parallel.fsdp == 1 or parallel.engine == "deepspeed":  # which pads one flat tensor of all trained parameters
        return True
    unlike = {kind: layer for layer, kind in enumerate(kinds_of(run, 0))}  # a layer of each kind has all sizes
    short = run.without_layers(set(range(run.structure.num_layers)) - set(unlike.values()))
    shapes = (p.shape for p in build(short, "meta").model.parameters() if p.requires_grad)
    return all(shape[0] % parallel.fsdp == 0 for shape in shapes if shape)
