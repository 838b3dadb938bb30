"""What a person sees while training runs: a progress bar on stderr, with the last losses beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from moetune.report.units import gib


@contextmanager
def reading(console: Console, folder: str | None, passes: int = 1) -> Iterator[Callable[[float], None] | None]:
    """A bar of the bytes of a checkpoint that have been read, on a terminal; what to tell the share read so far.

    Args:
        passes: how often it is read.
    """
    if folder is None or not console.is_terminal:
        yield None
        return
    size = passes * sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    with Progress(TextColumn("reading weights"), BarColumn(), DownloadColumn(), console=console, transient=True) as bar:
        task = bar.add_task("read", total=size or None)
        yield lambda share: bar.update(task, completed=share * size)


class ProgressBar(TrainerCallback):
    """A rich progress bar; where stderr is no terminal, a line for each that is logged."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar: Progress | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._began, self._first_step = time.monotonic(), state.global_step
        if self.console.is_terminal:
            self.bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[news]}"),
                console=self.console,
            )
            self.task = self.bar.add_task("train", total=state.max_steps, completed=state.global_step, news="")
            self.bar.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        logs = logs or {}
        if "loss" in logs:
            self._note_step(state, logs)
        if "eval_loss" in logs:
            self.console.print(
                f"step {state.global_step}: held-out loss {logs['eval_loss']:.4f}", highlight=False, soft_wrap=True
            )

    def _note_step(self, state: TrainerState, logs: dict[str, float]) -> None:
        news = f"loss {logs['loss']:.4f}  {logs['tokens_per_second']:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.update(self.task, news=news)
            return
        done, left = state.global_step - self._first_step, state.max_steps - state.global_step
        seconds = round((time.monotonic() - self._began) / max(done, 1) * left)
        memory = f"  {gib(int(logs['peak_allocated']))}" if "peak_allocated" in logs else ""
        self.console.print(
            f"step {state.global_step}/{state.max_steps}: {news}  lr {logs['learning_rate']:.3g}{memory}  "
            f"{timedelta(seconds=seconds)} left",
            highlight=False,
            soft_wrap=True,
        )

    def stop(self) -> None:
        """Gives the terminal back, cursor included; to be called however training ends."""
        if self.bar is not None:
            self.bar.stop()
