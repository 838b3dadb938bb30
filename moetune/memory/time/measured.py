"""`speed_of`: tokens per second that a finished run reached, from its `metrics.jsonl`."""

import statistics

from moetune.errors import UserError
from moetune.files import expanded
from moetune.run.folder_files import read_metrics


def speed_of(path: str) -> float:
    """Return the median tokens per second of a finished run, given its run folder or its `metrics.jsonl`. The first
    line is left out if there are more, because the first steps load kernels.

    Raises:
        UserError: the file does not exist or cannot be read, or none of its lines has `tokens_per_second`.
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
