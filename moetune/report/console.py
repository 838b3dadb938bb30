"""The terminal, as everything here writes on it."""

from rich.console import Console


def terminal(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that prints what it is given: in a path, neither `[/]` nor `:key:` stands for something else."""
    return Console(stderr=stderr, quiet=quiet, markup=False, emoji=False)
