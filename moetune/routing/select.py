"""`moetune select`: put chosen experts into a run file, as many as fit."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from moetune.config.load import load_run_config, read_run_config
from moetune.config.schema import ChoiceConfig, ExpertsConfig, LoraConfig, RunConfig
from moetune.errors import UserError
from moetune.memory.report import MemoryReport
from moetune.planning.fit import headroom, last_that_fits
from moetune.planning.predictor import Predictor
from moetune.report.units import gib

Part = Literal["experts", "lora"]
DEFAULT_LORA = LoraConfig(rank=16, alpha=32, targets=("experts",))
"""LoRA settings for a choice of experts without a run file."""


def choice_of(settings: dict[str, Any]) -> ChoiceConfig:
    """Return the choice of experts, as under `adapt.experts` in a run file, for command-line options.

    `settings` are keys of `ChoiceConfig` -> values, None for options that were not given; `budget` is a share as text,
    such as "0.25", or a memory size. Raises `UserError` if they do not validate.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    with suppress(KeyError, ValueError):  # no budget, or a memory size
        given["budget"] = float(given["budget"])
    try:
        return ChoiceConfig.model_validate(given)
    except ValidationError as error:
        lines = (f"--{'.'.join(map(str, item['loc'])) or 'how many'}: {item['msg']}" for item in error.errors())
        raise UserError("\n".join(line.replace("Value error, ", "") for line in lines)) from None


def with_choice(config: RunConfig | None, model: str, choice: ChoiceConfig, part: Part) -> RunConfig:
    """Return a configuration that trains the chosen experts, in full precision (`experts`) or with LoRA (`lora`).

    The choice is added to `config`; if that is None, to a new configuration for `model` that trains nothing else.
    """
    config = config or read_run_config({"model": {"path": model}, "adapt": {}}, (), "select")
    if part == "experts":
        return config.but(adapt={"experts": choice})
    lora = config.adapt.lora or DEFAULT_LORA
    targets = lora.targets if "experts" in lora.targets else (*lora.targets, "experts")
    return config.but(adapt={"lora": lora.but(ids=choice, targets=targets)})


def within_budget(run: RunConfig | Path | str, on_try: Callable[[int, bool], None] = lambda k, fits: None) -> RunConfig:
    """Replace a memory `budget` for experts in a configuration by `k`, the largest number of experts of each layer that
    is expected to fit it.

    Each k is traced with the experts that the scores choose, because memory also depends on which experts of a layer
    train: frozen ones are computed in groups of neighbours.

    Args:
        run: a configuration, or the path of a run file; without a memory budget, it is returned unchanged.
        on_try: called with each k that was tried, and whether it fits.

    Raises:
        UserError: there are budgets for both `adapt.experts` and `adapt.lora.ids`; not one expert of each layer fits;
            or the run cannot be resolved or predicted.
    """
    config = run if isinstance(run, RunConfig) else load_run_config(run)
    lora = config.adapt.lora
    parts: dict[Part, Any] = {"experts": config.adapt.experts, "lora": None if lora is None else lora.ids}
    choices = {
        part: choice
        for part, choice in parts.items()
        if isinstance(choice, ChoiceConfig) and isinstance(choice.budget, str)
    }
    if not choices:
        return config
    if len(choices) > 1:
        raise UserError(
            "adapt.experts.budget and adapt.lora.ids.budget: only one of them can be a memory size; give the other a k"
        )
    ((part, choice),) = choices.items()
    predictor = Predictor(gpu=str(choice.budget))

    def choosing(experts: ChoiceConfig | dict[int, tuple[int, ...]]) -> RunConfig:
        """Return `config` with another choice in place of the budget: by scores, or layer number -> expert ids."""
        if part == "lora":
            return config.but(adapt={"lora": {"ids": experts}})
        return config.but(
            adapt={"experts": experts if isinstance(experts, ChoiceConfig) else ExpertsConfig(ids=experts)}
        )

    def chosen(k: int) -> RunConfig:
        return choosing(choice.but(budget=None, k=k))

    smallest = predictor.resolve(chosen(1))
    ids = getattr(smallest.config.adapt, part).ids
    most = min(layer.shape.num_experts for layer in smallest.structure.moe_layers if layer.index in ids)

    def predicted(number: int) -> MemoryReport:
        """Predict the run with the `number` + 1 experts of each layer that the scores choose."""
        report = predictor.quick(chosen(number + 1))
        on_try(number + 1, headroom(report) >= 0)
        return report

    last, reports = last_that_fits(most, predicted, headroom)
    if last < 0:
        raise UserError(
            f"adapt.{part}: one expert of each of {len(ids)} layers takes {gib(reports[0].required)}, more than the "
            f"budget of {choice.budget}; choose fewer layers, or see in moetune predict which settings need less"
        )
    return chosen(last + 1)
