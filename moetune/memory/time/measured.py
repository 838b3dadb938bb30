"""Measured speed of a finished run."""

from __future__ import annotations

import statistics

from moetune.errors import UserError
from moetune.files import expanded
from moetune.run.records import read_metrics


def speed_of(path: str) -> float:
    """Tokens a second of a run folder or its `metrics.jsonl`: the median of its lines but the first, which loads
    kernels, where there are more.

    Raises:
        UserError: there is no such file, or no line of it has a speed.
    """
    file = expanded(path)
    file = file / "metrics.jsonl" if file.is_dir() else file
    try:
        speeds = [speed for line in read_metrics(file) if (speed := line.get("tokens_per_second"))]
    except UserError as error:
        raise UserError(f"--measured {path!r}: {error}") from None
    if not speeds:
        raise UserError(f"--measured {path!r}: no line of {file} has tokens_per_second; give a run that has trained")
    return statistics.median(speeds[1:] or speeds)
