"""`SearchProgress`: progress of `moetune plan` on stderr: what is looked at, ways that were searched, what was found.

Importing this does not import torch, so that something is printed at once.
"""

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


class SearchProgress:
    """Progress of a search: a bar of the ways that were searched on a terminal, with what is found above it; elsewhere
    a line for each.

    Use as a context manager, which begins with printing `head`: what is looked at.
    """

    def __init__(self, console: Console, head: str) -> None:
        self.console, self._last = console, ""
        console.print(head, highlight=False, soft_wrap=True)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[now]}", markup=False),
        )
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.bar.add_task("", total=None, now="")

    def __enter__(self) -> "SearchProgress":
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def show(self, searched: int, of: int, now: str, best: str) -> None:
        """Show how many of the ways were searched, what is done now, and the last run that was found, if it is new."""
        count = f"{searched} of {of} ways"
        self.bar.update(self.task, completed=searched, total=of, description=count, now=now)
        if best and best != self._last:
            self._last = best
            self.console.print(f"{count}: {best}", highlight=False, soft_wrap=True)
