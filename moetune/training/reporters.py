"""`train.report_to`: the same numbers as in `metrics.jsonl`, to whatever transformers has a callback for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from moetune.config.schema import TrainConfig
from moetune.errors import UserError, suggest


def check_reporters(names: tuple[str, ...]) -> None:
    """Raises `UserError` for a reporter that transformers does not know, or whose package is not installed."""
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            hint = suggest(name, INTEGRATION_TO_CALLBACK) or f" There are: {', '.join(INTEGRATION_TO_CALLBACK)}."
            raise UserError(f"train.report_to: {name!r} is not a reporter.{hint}")
        try:
            INTEGRATION_TO_CALLBACK[name]()
        except (ImportError, RuntimeError, ValueError) as error:  # reporters do not agree on one
            raise UserError(f"train.report_to: {name!r} cannot be used: {error}") from None


@dataclass
class Reporters:
    """The reporters of a run, told by the rank that speaks for all."""

    model: PreTrainedModel
    callbacks: list[TrainerCallback] = field(default_factory=list)
    state: TrainerState = field(default_factory=TrainerState)
    arguments: TrainingArguments | None = None

    @classmethod
    def of(cls, train: TrainConfig, output: Path, model: PreTrainedModel) -> Reporters:
        """Those that the run file names; its settings in the words of transformers."""
        if not train.report_to:
            return cls(model)
        arguments = TrainingArguments(
            output_dir=str(output),
            max_steps=train.steps,
            per_device_train_batch_size=train.micro_batch,
            gradient_accumulation_steps=train.accumulate,
            warmup_steps=train.warmup,
            max_grad_norm=train.max_grad_norm,
            seed=train.seed,
            logging_steps=train.log_every,
            report_to=list(train.report_to),
            use_cpu=model.device.type == "cpu",
            bf16=False,
        )
        callbacks = [INTEGRATION_TO_CALLBACK[name]() for name in train.report_to]
        return cls(model, callbacks, TrainerState(max_steps=train.steps), arguments)

    def begin(self) -> None:
        self._tell("on_init_end")
        self._tell("on_train_begin")

    def log(self, step: int, epoch: float, line: Mapping[str, Any]) -> None:
        """The numbers of a line."""
        self.state.global_step, self.state.epoch = step, epoch
        self._tell("on_log", logs={name: value for name, value in line.items() if isinstance(value, int | float)})

    def end(self) -> None:
        self._tell("on_train_end")

    def _tell(self, event: str, **more: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self.arguments, self.state, TrainerControl(), model=self.model, **more)
