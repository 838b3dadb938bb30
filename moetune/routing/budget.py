"""How many experts of each layer a run has memory for: the largest number that the predictor says fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from moetune.config.load import load_run_config
from moetune.config.schema import ChoiceConfig, ExpertsConfig, RunConfig
from moetune.errors import UserError
from moetune.memory.report import MemoryReport
from moetune.planning.predictor import Predictor
from moetune.planning.solve import last_that_fits
from moetune.report.units import gib


def within_budget(run: RunConfig | Path | str, on_try: Callable[[int, bool], None] = lambda k, fits: None) -> RunConfig:
    """The run file with `k` in the place of a `budget` of memory; without one, as it is.

    As in planning/solve.py: found by closed form, judged by traces. What is evaluated has the first k experts of each
    layer, so that layers are alike; what is traced has those that are chosen, because a layer's peak depends on which
    of its experts train: the others are worked on in groups of neighbours.

    Args:
        on_try: is told each number that was tried, and whether it fits.

    Raises:
        UserError: not one expert a layer fits; or as `resolve` and `predict`.
    """
    config = run if isinstance(run, RunConfig) else load_run_config(run)
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
    predictor = Predictor(gpu=str(choice.budget))

    def chosen(k: int) -> RunConfig:
        return _with(config, key, choice.but(budget=None, k=k))

    one = predictor.resolve(chosen(1))
    ids = getattr(one.config.adapt, key).ids
    most = min(layer.shape.num_experts for layer in one.structure.moe_layers if layer.index in ids)
    judged: dict[int, MemoryReport] = {}

    def predicted(number: int) -> MemoryReport:
        k = number + 1
        some = {index: tuple(range(k)) for index in ids}
        report = predictor.of(_with(config, key, ExpertsConfig(ids=some) if key == "experts" else some))
        on_try(k, bool(report.fits))
        return report

    def fits(k: int) -> bool:
        if k not in judged:
            judged[k] = predictor.traced(chosen(k))
            on_try(k, bool(judged[k].fits))
        return bool(judged[k].fits)

    k = 1 + last_that_fits(most, predicted)[0]
    while k < most and fits(k + 1):
        k += 1
    while k and not fits(k):
        k -= 1
    if not k:
        raise UserError(
            f"adapt.{key}: one expert of each of {len(ids)} layers takes {gib(judged[1].required)}, more than the "
            f"budget of {choice.budget}; name fewer layers, or see moetune predict for what takes less"
        )
    return chosen(k)


def _choice(config: RunConfig, key: str) -> ChoiceConfig | None:
    value: Any = getattr(config.adapt, key)
    value = value.ids if key == "lora" and value is not None else value
    return value if isinstance(value, ChoiceConfig) else None


def _budget(choice: ChoiceConfig | None) -> str | float | None:
    return None if choice is None else choice.budget


def _with(config: RunConfig, key: str, chosen: object) -> RunConfig:
    return config.but(adapt={key: chosen if key == "experts" else {"ids": chosen}})
