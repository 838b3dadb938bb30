"""`SearchProgress`: progress of `moetune plan` on stderr: number of strategies searched, the current one, runs found.

Importing this does not import torch, so that something is printed at once.
"""

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


class SearchProgress:
    """Progress of a plan: on a terminal a bar of the strategies (for users: ways) that were searched, below a line for
    each run found; elsewhere these lines alone.

    Creating it prints `head`, a line on what is planned. Use it as a context manager, which shows and removes the bar.
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
        """Show that `searched` of `of` strategies were searched, and `now`, what is being done, beside the bar.

        `best` describes the last run that was found (empty: none yet); it is printed when it changes.
        """
        count = f"{searched} of {of} ways"
        self.bar.update(self.task, completed=searched, total=of, description=count, now=now)
        if best and best != self._last:
            self._last = best
            self.console.print(f"{count}: {best}", highlight=False, soft_wrap=True)
