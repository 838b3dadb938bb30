"""Whether two run files are of one run: all settings are equal, but for those that may change."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moetune.config.load import parse
from moetune.config.schema import RunConfig
from moetune.errors import reading
from moetune.parallel.coordinates import data_ranks

FREE_ON_RESUME = {
    "output", "hardware", "parallel", "train.steps", "train.epochs", "train.log_every", "train.eval_every",
    "train.save_every", "train.keep_checkpoints", "train.report_to", "train.eval_micro_batch", "train.on_oom",
}  # fmt: skip
FREE_ON_EXPORT = FREE_ON_RESUME | {"model.path", "model.weights"}
"""The base may have moved since."""
_MOST_PROBLEMS = 10


def settings(run: RunConfig | Path) -> dict[str, Any]:
    """A run file, flat. Keys that are newer than a stored one have their defaults, by which it was run."""
    config = run if isinstance(run, RunConfig) else None
    if isinstance(run, Path):
        with reading(repr(str(run))):
            text = run.read_text(encoding="utf-8")
        tree = parse(text, repr(str(run)))
        with suppress(ValidationError):  # what is no run file any more is compared as it stands, and named
            config = RunConfig.model_validate(tree)
    if config is not None:
        tree = config.model_dump(mode="json")
        # More ranks with fewer micro-batches each take the same step.
        together = tree["train"].pop("accumulate") * data_ranks(config.parallel)
        tree["train"]["accumulate, over all ranks"] = together
    return _flatten(tree)


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def changes(before: dict[str, Any], now: dict[str, Any], free: set[str]) -> list[str]:
    """One line for each setting that differs and is not free to; beyond some, how many more there are."""
    changed = [
        f"{key}: {before.get(key)!r} before, {now.get(key)!r} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not any(key == name or key.startswith(f"{name}.") for name in free)
    ]
    more = len(changed) - _MOST_PROBLEMS
    return [*changed[:_MOST_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]
