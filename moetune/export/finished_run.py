"""A run folder, read: its run file, its newest checkpoint, and the base checkpoint that it started from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetune.adapt.base import checkpoint_of
from moetune.adapt.build import Adapted, build
from moetune.config import RunConfig
from moetune.errors import UserError
from moetune.hub.fingerprint import Base, Fingerprint, headers
from moetune.hub.tensor_files import DTYPES, Stored, read_header
from moetune.run_file import load_run_config
from moetune.train.checkpoint import TRAINED_FILE, parts_of
from moetune.train.run_folder import BASE_FILE, RUN_FILE, RunFolder, step_of


@dataclass(frozen=True)
class FinishedRun:
    """What a run left.

    Attributes:
        checkpoint: the newest complete one.
        adapted: the trained model on the meta device: its parts, its names, what was selected.
        trained: name in the adapted model -> place of the tensor that trained.
        base: what training noted of the checkpoint that it started from; None for random weights.
    """

    path: Path
    config: RunConfig
    checkpoint: Path
    adapted: Adapted
    trained: dict[str, Stored]
    base: Base | None
    damaged: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        return step_of(self.checkpoint)


def open_run(path: Path) -> FinishedRun:
    """Reads a run folder; no weights yet.

    Raises:
        UserError: no such folder, no run or no checkpoint in it, or a checkpoint that is damaged or of another run.
    """
    path = path.expanduser()
    if not path.is_dir():
        raise UserError(f"run folder {str(path)!r} does not exist")
    if not (path / RUN_FILE).is_file():
        raise UserError(f"{str(path)!r} is not a run folder: no {RUN_FILE} in it")
    config = load_run_config(path / RUN_FILE)
    folder = RunFolder(path)
    checkpoint = folder.newest_whole()
    if checkpoint is None:
        raise UserError(f"the run in {str(path)!r} has no checkpoint yet; train.save_every says when one is written")
    base = folder.base() if config.model.weights == "pretrained" else None
    if base is None and config.model.weights == "pretrained":
        raise UserError(
            f"{str(path / BASE_FILE)!r} is missing, which says what the run was trained on; if model.path "
            f"{config.model.path!r} is that still, moetune train {path / RUN_FILE} --resume auto notes it anew"
        )
    trained = read_header(checkpoint / TRAINED_FILE)
    adapted = build(config, "meta")
    expected = {
        part.name: tuple(parameter.shape if part.row is None else parameter.shape[1:])
        for parameter, parts in parts_of(adapted).items()
        for part in parts
    }
    for name in sorted(expected.keys() | trained.keys()):
        found = trained[name].shape if name in trained else None
        if found != expected.get(name):
            raise UserError(
                f"{str(trained[name].file if found else checkpoint)!r} does not fit {RUN_FILE}: {name} is "
                f"{_shape(found)} in it, not {_shape(expected.get(name))}"
            )
        if trained[name].dtype not in DTYPES:
            raise UserError(f"{str(trained[name].file)!r}: {name} has type {trained[name].dtype}, which nothing trains")
    return FinishedRun(path, config, checkpoint, adapted, trained, base, tuple(folder.damaged))


def base_folder(run: FinishedRun) -> Path:
    """The folder of the base checkpoint; its weights are still unread (`refuse_changed`).

    Raises:
        UserError: the run began with random weights, or the base cannot be had or has other tensors by now.
    """
    if run.base is None:
        raise UserError(
            f"the run in {str(run.path)!r} began with random weights (model.weights: random): no checkpoint holds "
            "them, so there is no base to export for"
        )
    folder = checkpoint_of(run.config.model.path)
    _refuse(run, folder, run.base.fingerprint.difference_of_tensors(headers(folder)))
    return folder


def refuse_changed(run: FinishedRun, folder: Path, found: Fingerprint) -> None:
    """Raises `UserError` if `found`, that of the base folder, is not the fingerprint that the run noted."""
    assert run.base is not None
    _refuse(run, folder, run.base.fingerprint.difference(found))


def _refuse(run: FinishedRun, folder: Path, difference: str | None) -> None:
    if difference is not None:
        raise UserError(
            f"the base in {str(folder)!r} has changed since the run in {str(run.path)!r} was trained on it: "
            f"{difference}; put back the checkpoint that it was"
        )


def about(run: FinishedRun) -> dict[str, Any]:
    """What a manifest says of the run: its folder's name, the step, the run file, and what was selected."""
    selection = run.adapted.selection
    return {
        "run": run.path.resolve().name,
        "step": run.step,
        "run_file": run.config.model_dump(mode="json"),
        "selection": {
            "full": sorted(selection.full),
            "experts": {str(layer): list(ids) for layer, ids in selection.experts.items()},
            "lora_experts": {str(layer): list(ids) for layer, ids in selection.lora_experts.items()},
            "lora_linears": list(selection.lora_linears),
        },
    }


def _shape(shape: tuple[int, ...] | None) -> str:
    return "not there" if shape is None else str([*shape])
