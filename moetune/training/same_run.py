"""Whether two run files are of one run: whether all settings are equal, but for those that may change."""

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


def changed_settings(before: RunConfig | Path, now: RunConfig | Path, free: set[str]) -> list[str]:
    """Return a line for each setting that differs and is not free to; for the eleventh and more their number."""
    old, new = _settings(before), _settings(now)
    changed = [
        f"{key}: {old.get(key)!r} before, {new.get(key)!r} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not any(key == name or key.startswith(f"{name}.") for name in free)
    ]
    more = len(changed) - _MOST_PROBLEMS
    return [*changed[:_MOST_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]


def _settings(run: RunConfig | Path) -> dict[str, Any]:
    """Return a run file as `{"train.steps": 9, …}`. Keys that a stored one does not have get their defaults."""
    config = run if isinstance(run, RunConfig) else None
    if isinstance(run, Path):
        with reading(repr(str(run))):
            text = run.read_text(encoding="utf-8")
        tree = parse(text, repr(str(run)))
        with suppress(ValidationError):  # what is no valid run file any more is compared as it stands
            config = RunConfig.model_validate(tree)
    if config is not None:
        tree = config.model_dump(mode="json")
        # More ranks with fewer micro-batches each take the same step.
        tree["train"]["accumulate, over all ranks"] = tree["train"].pop("accumulate") * data_ranks(config.parallel)
    return _flat(tree)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
