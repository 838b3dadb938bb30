"""`train.report_to`: send the numbers of `metrics.jsonl` to trackers such as TensorBoard, through accelerate."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from moetune.config.schema import RunConfig
from moetune.errors import UserError, suggest


def check_reporters(names: tuple[str, ...]) -> None:
    """Raise `UserError` for a tracker that accelerate does not support, or whose package is not installed."""
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            hint = suggest(name, LOGGER_TYPE_TO_CLASS) or f" There are: {', '.join(LOGGER_TYPE_TO_CLASS)}."
            raise UserError(f"train.report_to: {name!r} is not a reporter.{hint}")
        if name not in map(str, get_available_trackers()):
            raise UserError(f"train.report_to: {name!r} cannot be used: its package is not installed")


class Reporters:
    """The trackers of `train.report_to`, which get the model's path and the `train:` settings; on the first rank only.

    Args:
        output: the run folder; trackers that write files get its subfolder `runs`.
    """

    def __init__(self, config: RunConfig, output: Path) -> None:
        self.trackers = list[GeneralTracker]()
        if config.train.report_to:
            PartialState()  # accelerate's logging raises an error without this object
        for name in config.train.report_to:
            kind = LOGGER_TYPE_TO_CLASS[name]
            arguments = {"logging_dir": str(output / "runs")} if kind.requires_logging_directory else {}
            self.trackers.append(kind(os.environ.get("WANDB_PROJECT") or "moetune", **arguments))
        settings = {"model": config.model.path} | config.train.model_dump(mode="json")
        for tracker in self.trackers:
            tracker.start()
            tracker.store_init_configuration(
                {name: value for name, value in settings.items() if isinstance(value, int | float | str)}
            )

    def log(self, step: int, line: Mapping[str, Any]) -> None:
        """Send the numbers of a metrics line to every tracker, `eval_NAME` as `eval/NAME` and any other NAME as
        `train/NAME`."""
        numbers = {
            f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}": value
            for name, value in line.items()
            if isinstance(value, int | float)
        }
        for tracker in self.trackers:
            tracker.log(numbers, step=step)

    def end(self) -> None:
        """Finish the trackers, which may wait for data to be sent."""
        for tracker in self.trackers:
            tracker.finish()
