"""A plan's candidates as commented run files, which `moetune train` accepts."""

import os
import re
from contextlib import suppress
from pathlib import Path

import yaml

from moetune.errors import UserError
from moetune.files import write_whole
from moetune.planning.candidate import Candidate
from moetune.planning.plan import Plan
from moetune.report.units import from_to, gib


def write_runs(plan: Plan, folder: Path) -> list[Path]:
    """Write a run file for each candidate of a plan into `folder`, created if needed; return the files in order.

    Raises:
        UserError: a file of that name exists, or one cannot be written.
    """
    files = []
    for number, candidate in enumerate(plan.candidates, 1):
        words = f"{number} {candidate.goal} {candidate.optimizer.split(',')[0]} {candidate.config.model.base}"
        files.append(folder / f"{re.sub(r'[^a-z0-9]+', '-', words.lower())}.yaml")
        if os.path.lexists(files[-1]):
            raise UserError(f"{str(files[-1])!r} exists; choose another folder with --write")
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, candidate in zip(files, plan.candidates, strict=True):
            write_whole(file, run_text(candidate, file), new=True)
    except OSError as error:
        with suppress(OSError):
            for file in files:
                file.unlink(missing_ok=True)
            if is_new:
                folder.rmdir()
        raise UserError(f"{str(folder)!r} cannot be written: {error.strerror or error}") from error
    return files


def run_text(candidate: Candidate, file: Path) -> str:
    """Return the text of a candidate's run file, under a header: command, predicted memory, what is given up.

    `file` is the path that it will have, for the command in the header and for `output:`.
    """
    report, config = candidate.report, candidate.config
    raw = config.model_dump(mode="json", exclude_unset=True)
    raw.setdefault("data", {"train": "data.jsonl"})
    raw["output"] = f"runs/{file.stem}"
    span, larger = report.span, candidate.next_larger
    assert report.gpu is not None
    next_larger = "" if larger is None else f"\n# {larger.what} {larger.risk}."
    given_up = f"\n# Given up: {'; '.join(candidate.strategy.gives_up)}." if candidate.strategy.gives_up else ""
    host = f", and {gib(report.fullest.host_bytes)} of host memory" if report.fullest.host_bytes else ""
    return (
        f"# {config.model.path}: {candidate.trains}; {candidate.optimizer}.\n#\n#     moetune train {file}\n#\n"
        f"# Predicted, fits: {report.verdict}. Needs {from_to(span.low, span.high)}, "
        f"{gib(span.expected)} expected, of {gib(report.gpu.usable_bytes)} of {report.gpu.name}{host}."
        f"{given_up}{next_larger}\n"
        f"{yaml.safe_dump(raw, sort_keys=False, default_flow_style=None, width=100)}"
    )
