"""How many experts of each layer a run has memory for: the largest number that the predictor says fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moetune.config import ChoiceConfig, ExpertsConfig, RunConfig
from moetune.errors import UserError
from moetune.memory.predict import predict
from moetune.report.units import gib
from moetune.run.resolve import resolve


def within_budget(config: RunConfig, on_try: Callable[[int, bool], None] = lambda k, fits: None) -> RunConfig:
    """The run file with `k` in the place of a `budget` of memory; without one, as it is.

    By bisection, over traces of the run with as many experts in each layer. From there on the experts that are chosen
    are traced, because a layer's peak depends on which of its experts train: the others are worked on in groups of
    neighbours.

    Args:
        on_try: is told each number that was tried, and whether it fits.

    Raises:
        UserError: not one expert a layer fits; or as `resolve` and `predict`.
    """
    keys = [key for key in ("experts", "lora") if isinstance(_budget(_choice(config, key)), str)]
    if not keys:
        return config
    if len(keys) > 1:
        raise UserError(
            "adapt.experts.budget, adapt.lora.ids.budget: one budget for the whole run; give one of them a k"
        )
    key = keys[0]
    choice = _choice(config, key)
    assert choice is not None
    budget = str(choice.budget)
    chosen = resolve(_with(config, key, choice.model_copy(update={"budget": None, "k": 1})))
    ids = getattr(chosen.config.adapt, key).ids
    moe_layers = {layer.index: layer.shape.num_experts for layer in chosen.anatomy.moe_layers}
    most = min(moe_layers[index] for index in ids)
    required: dict[int, int] = {}

    def fits(k: int, config: RunConfig) -> bool:
        report = predict(resolve(config, like=chosen), gpu=budget, advise=False)
        required[k] = report.required
        on_try(k, bool(report.fits))
        return bool(report.fits)

    def first(k: int) -> RunConfig:
        """With the first k experts of each of the layers: those that are alike stand for each other in a trace."""
        return _with_ids(config, key, {index: tuple(range(k)) for index in ids})

    def of_choice(k: int) -> RunConfig:
        return _with(config, key, choice.model_copy(update={"budget": None, "k": k}))

    low, high = 0, most + 1  # low fits, or is none; high does not, or is more than there are
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle, first(middle)) else (low, middle)
    if low and not fits(low, of_choice(low)):
        low -= 1
        while low and not fits(low, of_choice(low)):
            low -= 1
    else:
        while low < most and fits(low + 1, of_choice(low + 1)):
            low += 1
    if not low:
        raise UserError(
            f"adapt.{key}: one expert of each of {len(ids)} layers takes {gib(required[1])}, more than the budget of "
            f"{budget}; name fewer layers, or see moetune predict for what takes less"
        )
    return of_choice(low)


def _choice(config: RunConfig, key: str) -> ChoiceConfig | None:
    value: Any = getattr(config.adapt, key)
    value = value.ids if key == "lora" and value is not None else value
    return value if isinstance(value, ChoiceConfig) else None


def _budget(choice: ChoiceConfig | None) -> str | float | None:
    return None if choice is None else choice.budget


def _with(config: RunConfig, key: str, choice: ChoiceConfig) -> RunConfig:
    part = choice if key == "experts" else config.adapt.lora.model_copy(update={"ids": choice})  # type: ignore[union-attr]
    return config.model_copy(update={"adapt": config.adapt.model_copy(update={key: part})})


def _with_ids(config: RunConfig, key: str, ids: dict[int, tuple[int, ...]]) -> RunConfig:
    lora = config.adapt.lora
    part = ExpertsConfig(ids=ids) if key == "experts" else lora and lora.model_copy(update={"ids": ids})
    return config.model_copy(update={"adapt": config.adapt.model_copy(update={key: part})})
