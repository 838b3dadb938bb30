"""The speed of a run that has been."""

from __future__ import annotations

import json
import statistics

from moetune.errors import UserError
from moetune.files import expanded


def speed_of(path: str) -> float:
    """Tokens a second of a run folder or its `metrics.jsonl`: the median of its lines but the first, which loads
    kernels, where there are more.

    Raises:
        UserError: there is no such file, or no line of it has a speed.
    """
    file = expanded(path)
    file = file / "metrics.jsonl" if file.is_dir() else file
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        speeds = [float(line["tokens_per_second"]) for line in lines if line.get("tokens_per_second")]
    except OSError as error:
        raise UserError(f"--measured {path!r}: {file} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"--measured {path!r}: {file} is no metrics.jsonl of a run: {error}") from None
    if not speeds:
        raise UserError(f"--measured {path!r}: no line of {file} has tokens_per_second; give a run that has trained")
    return statistics.median(speeds[1:] or speeds)
