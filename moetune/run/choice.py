"""Choices of experts by scores: `from:` under `adapt.experts` or `adapt.lora.ids` becomes ids.

Scores are the statistics that `moetune score` records (scores.py). The experts of each layer are ranked separately, by
the tokens that carry loss, whose next token counts in the training loss (docs/concepts/choosing-experts.md).
"""

import random
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from moetune.config.fields import IdsByLayer
from moetune.config.lora_rank import rank_of
from moetune.config.resolved import ResolvedAdapt, ResolvedLora, resolved
from moetune.config.schema import AdaptConfig, ChoiceConfig, ExpertsConfig, LoraConfig
from moetune.errors import UserError
from moetune.models.moe import MoeLayer
from moetune.models.structure import ModelStructure
from moetune.run.scores import LayerScores, Scores, scores_of_model


@dataclass(frozen=True)
class Coverage:
    """Fractions of the routed (token, expert) pairs that the chosen experts receive, over tokens that carry loss.

    Attributes:
        layers: layer index -> fraction of the layer's pairs.
        random: layer index -> expected fraction for as many experts drawn at random.
        total, random_total: the same over all layers of the choice.
    """

    layers: Mapping[int, float]
    random: Mapping[int, float]
    total: float
    random_total: float


def choose(
    choice: ChoiceConfig, scores: Scores, structure: ModelStructure, where: str, lora: LoraConfig | None = None
) -> IdsByLayer:
    """Return layer index -> the ids of the experts that a `from:` block chooses, best first.

    Args:
        choice: the block; a budget in bytes must already have been replaced by `k` (routing/select.py).
        scores: the scores that it names.
        where: the key of the run file, for messages.
        lora: the LoRA settings that the chosen experts train with, on which the parameters of an expert depend; None if
            they train in full precision.

    Raises:
        UserError: the scores of a second data set cannot be read or are of another model; a layer does not exist; the
            number of experts comes to none, or to more than a layer has.
    """
    background = None
    if choice.background is not None:
        background = scores_of_model(choice.background, structure, f"{where}.background")
    layers = {layer.index: layer for layer in structure.moe_layers}
    if isinstance(choice.layers, tuple):
        if missing := [index for index in choice.layers if index not in layers]:
            raise UserError(
                f"{where}.layers: layer {missing[0]} has no experts; choose from {', '.join(map(str, layers))}"
            )
        layers = {index: layers[index] for index in choice.layers}
    elif choice.layers == "none":
        return {}
    ranked = {index: rank(choice, index, scores, background) for index in layers}
    if choice.p is not None:
        shares = {index: _share(choice.rule, scores.layers[index]) for index in layers}
        return {index: prefix(ids, shares[index], choice.p) for index, ids in ranked.items()}
    if isinstance(choice.budget, float):
        counts = {index: int(choice.budget * layer.shape.num_experts + 1e-9) for index, layer in layers.items()}
        return {index: ids[: max(1, counts[index])] for index, ids in ranked.items()}
    k = _number_per_layer(choice, layers.values(), where, lora)
    return {index: ids[:k] for index, ids in ranked.items()}


def rank(choice: ChoiceConfig, layer: int, scores: Scores, background: Scores | None) -> tuple[int, ...]:
    """Return the ids of all experts of a layer, best first by `choice.rule`; of equally good ones the lower id first.

    Shares in `background`, scores of a second data set, are subtracted; it is None for all rules but `foreground`.
    """
    of_layer = scores.layers[layer]
    experts = range(of_layer.num_experts)
    if choice.rule == "random":
        return tuple(random.Random(f"{choice.seed} {layer}").sample(experts, len(experts)))
    value: Sequence[float]
    if choice.rule == "reap":
        value = of_layer.loss.reap
    elif choice.rule == "least":
        value = [-tokens for tokens in of_layer.loss.tokens]
    else:
        value = _share(choice.rule, of_layer)
    if background is not None:
        value = [own - usual for own, usual in zip(value, background.layers[layer].loss.share, strict=True)]
    return tuple(sorted(experts, key=lambda expert: (-value[expert], expert)))


def prefix(ranked: Sequence[int], share: Sequence[float], p: float) -> tuple[int, ...]:
    """Return the shortest prefix of the ids in `ranked` whose shares sum to at least `p` (ESFT, arXiv 2407.01906).

    `share` has each expert's fraction of the layer's routing, by expert id.
    """
    reached = [*accumulate(share[expert] for expert in ranked)]
    return tuple(ranked[: bisect_left(reached, p) + 1])


def coverage(chosen: Mapping[int, Sequence[int]], scores: Scores) -> Coverage:
    """Compute the coverage of `chosen`, layer index -> expert ids; k random experts of E cover k / E on average."""
    tokens = {index: scores.layers[index].loss.tokens for index in chosen}
    covered = {index: sum(tokens[index][expert] for expert in ids) for index, ids in chosen.items()}
    routed = {index: sum(tokens[index]) for index in chosen}
    at_random = {index: len(ids) / len(tokens[index]) for index, ids in chosen.items()}
    total = sum(routed.values()) or 1
    return Coverage(
        {index: covered[index] / (routed[index] or 1) for index in chosen},
        at_random,
        sum(covered.values()) / total,
        sum(at_random[index] * routed[index] for index in chosen) / total,
    )


def resolve_choices(
    adapt: AdaptConfig, structure: ModelStructure
) -> tuple[ResolvedAdapt, list[tuple[str, Scores]], list[str]]:
    """Return `adapt:` with ascending ids in place of choices by scores; (key of the run file, scores) of each choice;
    and a message for each that failed, for example because the scores are of another model, which becomes `none`."""
    scored: list[tuple[str, Scores]] = []
    problems: list[str] = []

    def ids_of(choice: ChoiceConfig, where: str, lora: LoraConfig | None = None) -> IdsByLayer | str:
        try:
            scores = scores_of_model(choice.from_, structure, f"{where}.from")
            chosen = choose(choice, scores, structure, where, lora)
        except UserError as error:
            problems.append(str(error))
            return "none"
        scored.append((f"{where}.from", scores))
        return {index: tuple(sorted(ids)) for index, ids in chosen.items() if ids} or "none"

    experts, lora = adapt.experts, adapt.lora
    if isinstance(experts, ChoiceConfig):
        experts = ExpertsConfig.model_validate({"ids": ids_of(experts, "adapt.experts")})
    if lora is not None:
        ids = ids_of(lora.ids, "adapt.lora.ids", lora) if isinstance(lora.ids, ChoiceConfig) else lora.ids
        lora = resolved(ResolvedLora, lora, ids=ids)
    return resolved(ResolvedAdapt, adapt, experts=experts, lora=lora), scored, problems


def _share(rule: str, layer: LayerScores) -> list[float]:
    """Return each expert's fraction of a layer's routing; the fractions sum to 1.

    The rule `gate` counts routing weights (ESFT's average gate score), all others tokens (its token selection ratio).
    """
    values: Sequence[float] = layer.loss.weight_sum if rule == "gate" else layer.loss.tokens
    total = sum(values) or 1
    return [value / total for value in values]


def _number_per_layer(choice: ChoiceConfig, layers: Iterable[MoeLayer], where: str, lora: LoraConfig | None) -> int:
    """Return how many experts a choice by `k`, `experts` or `parameters` takes from each layer.

    Raises:
        UserError: the number is 0 or more than a layer has; or the budget is still an amount of memory.
    """
    shapes = [layer.shape for layer in layers]
    fewest = min((shape.num_experts for shape in shapes), default=0)
    if isinstance(choice.budget, str):
        raise UserError(f"{where}.budget: {choice.budget} is memory; let moetune.within_budget make it a number first")
    if choice.k is not None:
        if choice.k > fewest:
            raise UserError(f"{where}.k: {choice.k} is more than the {fewest} experts of a layer")
        return choice.k
    if choice.experts is not None:
        asked, each, least = choice.experts, len(shapes), f"one in each of {len(shapes)} layers"
    else:
        asked = choice.parameters or 0
        ranks = [None if lora is None else rank_of(lora.rank, "experts", layer.index) for layer in layers]
        each = sum(shape.trained_parameters(lora, rank) for shape, rank in zip(shapes, ranks, strict=True))
        least = f"the {each:,} of one expert of each layer"
    if not (k := min(asked // max(each, 1), fewest)):
        name = "parameters" if choice.experts is None else "experts"
        raise UserError(f"{where}.{name}: {asked} are fewer than {least}; name fewer layers")
    return k
