"""What a run folder holds, for its page."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from moetune.adapt.count import count
from moetune.documents import read_json
from moetune.exporting.finished_run import config_of, refuse_other_model
from moetune.report.console import note
from moetune.report.run import RunFacts
from moetune.run.dtypes import this_device
from moetune.run.records import DriftFile, MemoryFile
from moetune.run.resolve import ResolvedRun, resolve
from moetune.training.run_folder import DRIFT_FILE, MEMORY_FILE, RUN_FILE, RunFolder

_PACKAGES = ("moetune", "torch", "transformers", "peft", "bitsandbytes", "datasets")


def run_of(path: Path) -> ResolvedRun:
    """The run of a run folder, resolved for this machine.

    Raises:
        UserError: it is no run folder, or its model is gone.
    """
    run = resolve(config_of(path), this_device())
    for text in refuse_other_model(RunFolder(path), run.model):
        note(text)
    return run


def facts_of(path: Path, run: ResolvedRun) -> RunFacts:
    """What the folder holds now."""
    counted = count(run)
    memory, drift = path / MEMORY_FILE, path / DRIFT_FILE
    assert counted.trainable is not None
    return RunFacts(
        name=path.resolve().name,
        model=run.config.model.path,
        steps=run.config.train.steps,
        metrics=RunFolder(path).metrics(),
        memory=read_json(memory, MemoryFile, remedy="delete it, and the page goes without")
        if memory.is_file()
        else None,
        trainable=counted.trainable,
        parameters=counted.parameter_count.total,
        versions={name: metadata.version(name) for name in _PACKAGES},
        drift=read_json(drift, DriftFile, remedy="write it again with moetune drift") if drift.is_file() else None,
        run_file=(path / RUN_FILE).read_text(encoding="utf-8"),
    )
