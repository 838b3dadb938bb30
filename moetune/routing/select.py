"""A choice of experts in words becomes part of a run file."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from moetune.config.load import read_run_config
from moetune.config.schema import ChoiceConfig, LoraConfig, RunConfig
from moetune.errors import UserError

DEFAULT_LORA = LoraConfig(rank=16, alpha=32, targets=("experts",))
"""Of a choice for LoRA without a run file."""


def choice_of(settings: dict[str, Any]) -> ChoiceConfig:
    """A choice, as a run file has it under `adapt.experts`. What is None is left out; `budget` may be a share as text.

    Raises:
        UserError: it is none.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    with suppress(KeyError, ValueError):  # there is none, or it is memory
        given["budget"] = float(given["budget"])
    try:
        return ChoiceConfig.model_validate(given)
    except ValidationError as error:
        lines = (f"--{'.'.join(map(str, item['loc'])) or 'how many'}: {item['msg']}" for item in error.errors())
        raise UserError("\n".join(line.replace("Value error, ", "") for line in lines)) from None


def with_choice(config: RunConfig | None, model: str, choice: ChoiceConfig, part: str) -> RunConfig:
    """A run file that trains what is chosen, `part` being experts or lora; without one, of the model and this alone."""
    config = config or read_run_config({"model": {"path": model}, "adapt": {}}, (), "select")
    if part == "experts":
        return config.but(adapt={"experts": choice})
    lora = config.adapt.lora or DEFAULT_LORA
    targets = lora.targets if "experts" in lora.targets else (*lora.targets, "experts")
    return config.but(adapt={"lora": lora.but(ids=choice, targets=targets)})
