"""Which experts recorded scores choose: `adapt.experts` and `adapt.lora.ids` with `from:` become lists of ids.

Each layer is ranked by itself, over its tokens that carry loss; docs/concepts/choosing-experts.md has the rules.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moetune.config.schema import AdaptConfig, ChoiceConfig, ExpertsConfig, LoraConfig
from moetune.errors import UserError
from moetune.models.moe import MoeLayer
from moetune.models.structure import ModelStructure
from moetune.run.scores import LayerScores, Scores, read_scores, refuse_other_model

Chosen = dict[int, tuple[int, ...]]
"""Layer -> the ids chosen, the first ranked first."""


@dataclass(frozen=True)
class Coverage:
    """Which share of the routed tokens that carry loss goes to chosen experts, by layer, and to as many chosen at
    random, on average; `total` and `random_total` are over all routed tokens of the layers that were asked about."""

    layers: Mapping[int, float]
    random: Mapping[int, float]
    total: float
    random_total: float


def choose(choice: ChoiceConfig, structure: ModelStructure, where: str, lora: LoraConfig | None = None) -> Chosen:
    """The experts that a choice names.

    Args:
        choice: its budget, if it is one of memory, was made a number before (routing/select.py).
        where: the key of the run file, for messages.
        lora: what is put on them, where they do not train whole: `parameters` then counts its factors.

    Raises:
        UserError: the scores cannot be read or are of another model; a layer does not exist; no expert is chosen, or
            more than there are.
    """
    scores = read_scores(choice.from_, f"{where}.from")
    refuse_other_model(scores, structure, f"{where}.from")
    background = None
    if choice.background is not None:
        background = read_scores(choice.background, f"{where}.background")
        refuse_other_model(background, structure, f"{where}.background")
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
    count = _how_many(choice, layers, where, lora)
    return {index: ids[: count(layers[index])] for index, ids in ranked.items()}


def rank(choice: ChoiceConfig, layer: int, scores: Scores, background: Scores | None) -> tuple[int, ...]:
    """All experts of a layer, best first; of equals the one with the lower number."""
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
        value = [here - there for here, there in zip(value, background.layers[layer].loss.share, strict=True)]
    return tuple(sorted(experts, key=lambda expert: (-value[expert], expert)))


def prefix(ranked: Sequence[int], share: Sequence[float], p: float) -> tuple[int, ...]:
    """The fewest of the first ranked whose shares sum to `p` (ESFT, arXiv 2407.01906)."""
    chosen: list[int] = []
    total = 0.0
    for expert in ranked:
        if total >= p:
            break
        chosen.append(expert)
        total += share[expert]
    return tuple(chosen)


def coverage(chosen: Mapping[int, Sequence[int]], scores: Scores) -> Coverage:
    """What a choice covers. A random choice of k of E experts covers k / E of a layer, on average."""
    covered = {index: sum(scores.layers[index].loss.tokens[e] for e in ids) for index, ids in chosen.items()}
    tokens = {index: sum(scores.layers[index].loss.tokens) for index in chosen}
    at_random = {index: len(ids) / scores.layers[index].num_experts for index, ids in chosen.items()}
    total = sum(tokens.values()) or 1
    return Coverage(
        {index: covered[index] / (tokens[index] or 1) for index in chosen},
        at_random,
        sum(covered.values()) / total,
        sum(at_random[index] * tokens[index] for index in chosen) / total,
    )


def settle(adapt: AdaptConfig, structure: ModelStructure) -> AdaptConfig:
    """`adapt:` with ids in the place of choices.

    Raises:
        UserError: as `choose`, for either of them.
    """
    experts, lora, problems = adapt.experts, adapt.lora, []
    try:
        if isinstance(experts, ChoiceConfig):
            experts = ExpertsConfig.model_validate({"ids": _written(choose(experts, structure, "adapt.experts"))})
    except UserError as error:
        problems.append(str(error))
    try:
        if lora is not None and isinstance(lora.ids, ChoiceConfig):
            ids = choose(lora.ids, structure, "adapt.lora.ids", lora)
            lora = lora.model_copy(update={"ids": _written(ids)})
    except UserError as error:
        problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return adapt.model_copy(update={"experts": experts, "lora": lora})


def scores_of(adapt: AdaptConfig) -> tuple[tuple[str, Scores], ...]:
    """The scores that `adapt:` chooses by, each with the key that names them."""
    lora = None if adapt.lora is None else adapt.lora.ids
    choices = {"adapt.experts.from": adapt.experts, "adapt.lora.ids.from": lora}
    return tuple((w, read_scores(c.from_, w)) for w, c in choices.items() if isinstance(c, ChoiceConfig))


def parameters_of(layer: MoeLayer, lora: LoraConfig | None) -> int:
    """What trains of one expert: all of it, or its low-rank factors (experts/bank.py, `ExpertLora`)."""
    shape = layer.shape
    if lora is None:
        return shape.parameters_per_expert
    parts = 2 if lora.gate_up == "split" and shape.has_gate else 1
    rows = shape.intermediate * (2 if shape.has_gate else 1)
    return lora.rank * (parts * shape.hidden + rows + shape.intermediate + shape.hidden)


def _written(chosen: Chosen) -> dict[int, tuple[int, ...]]:
    return {index: tuple(sorted(ids)) for index, ids in chosen.items() if ids}


def _share(rule: str, layer: LayerScores) -> list[float]:
    """Of a layer, summing to 1: ESFT's token-selection ratio, or its average gate score."""
    values: Sequence[float] = layer.loss.weight_sum if rule == "gate" else layer.loss.tokens
    total = sum(values) or 1
    return [value / total for value in values]


def _how_many(
    choice: ChoiceConfig, layers: Mapping[int, MoeLayer], where: str, lora: LoraConfig | None
) -> Callable[[MoeLayer], int]:
    """How many experts of each layer."""
    fewest = min((layer.shape.num_experts for layer in layers.values()), default=0)
    if isinstance(choice.budget, str):
        raise UserError(
            f"{where}.budget: {choice.budget} is memory, which takes predictions of the run; let moetune.within_budget "
            "make it a number first"
        )
    if choice.budget is not None:
        part = choice.budget
        return lambda layer: max(1, int(part * layer.shape.num_experts + 1e-9))
    if choice.k is not None:
        k, asked = choice.k, f"k: {choice.k}"
    elif choice.experts is not None:
        k, asked = choice.experts // max(len(layers), 1), f"experts: {choice.experts}"
        if k == 0:
            raise UserError(f"{where}.{asked} are fewer than one in each of {len(layers)} layers; name fewer layers")
        k = min(k, fewest)
    else:
        assert choice.parameters is not None
        each = sum(parameters_of(layer, lora) for layer in layers.values())
        k, asked = min(choice.parameters // max(each, 1), fewest), f"parameters: {choice.parameters}"
        if k == 0:
            raise UserError(
                f"{where}.{asked} are fewer than the {each:,} of one expert of each layer; name fewer layers"
            )
    if k > fewest:
        raise UserError(f"{where}.{asked} is more than the {fewest} experts of a layer")
    return lambda _: k
