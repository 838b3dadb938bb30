"""Progress on stderr (reading weights, counting items, training): bars or lines."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moetune.report.units import gib


@contextmanager
def loading_progress(console: Console, folder: str | None, passes: int = 1) -> Iterator[Callable[[float], None] | None]:
    """Show a progress bar of the bytes read from the `*.safetensors` in `folder`, which is read `passes` times.

    Yields a function to be called with the fraction read so far (0 to 1, of all passes); None if the console is no
    terminal or `folder` is None.
    """
    if folder is None or not console.is_terminal:
        yield None
        return
    size = passes * sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    with Progress(TextColumn("reading weights"), BarColumn(), DownloadColumn(), console=console, transient=True) as bar:
        task = bar.add_task("read", total=size or None)
        yield lambda share: bar.update(task, completed=share * size)


@contextmanager
def counting(console: Console, what: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, with the label `what`, at `done` of `total` items; yield a function to be called with
    the number of items finished since its last call."""
    columns = (TextColumn(what), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total, completed=done)
        yield lambda count: bar.advance(task, count)


class ProgressBar:
    """Progress of training: a bar of its steps on a terminal, elsewhere a line for each logged step. Call `begin` first
    and `stop` at the end."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar: Progress | None = None

    def begin(self, step: int, steps: int) -> None:
        """Start the display with `step` of `steps` optimizer steps done."""
        self._began, self._first_step, self._steps = time.monotonic(), step, steps
        if self.console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, TextColumn("{task.fields[news]}"), console=self.console)
            self.task = self.bar.add_task("train", total=self._steps, completed=step, news="")
            self.bar.start()

    def step_ends(self) -> None:
        """Advance the bar by one step, if there is a bar."""
        if self.bar is not None:
            self.bar.advance(self.task)

    def logged(self, line: Mapping[str, Any]) -> None:
        """Show a record of `metrics.jsonl`: loss and speed beside the bar, else also learning rate, memory and
        remaining time; of an evaluation, the held-out loss as a line of its own."""
        step = line["step"]
        if "eval_loss" in line:
            loss = "not finite" if line["eval_loss"] is None else f"{line['eval_loss']:.4f}"
            self.console.print(f"step {step}: held-out loss {loss}")
            return
        loss = "" if line["loss"] is None else f"loss {line['loss']:.4f}  "
        news = f"{loss}{line['tokens_per_second']:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.update(self.task, news=news)
            return
        seconds = round((time.monotonic() - self._began) / max(step - self._first_step, 1) * (self._steps - step))
        memory = "" if line["peak_allocated"] is None else f"  {gib(line['peak_allocated'])}"
        left = timedelta(seconds=seconds)
        self.console.print(f"step {step}/{self._steps}: {news}  lr {line['lr']:.3g}{memory}  {left} left")

    def stop(self) -> None:
        """Stop the bar and restore the cursor; also to be called after an error."""
        if self.bar is not None:
            self.bar.stop()
