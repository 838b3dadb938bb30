"""A run folder, read: its run file, its newest checkpoint, and the base checkpoint that it started from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from moetune.adapt.build import Adapted, build
from moetune.adapt.packed_base import is_packed_base, source_of
from moetune.anatomy.source import resolve
from moetune.config import RunConfig, load_run_config
from moetune.errors import UserError
from moetune.export.base_copy import CARRIED
from moetune.export.tensor_files import DTYPES, Stored, read_header
from moetune.train.run_folder import RUN_FILE, RunFolder, step_of
from moetune.train.trainer import TRAINED_FILE


@dataclass(frozen=True)
class FinishedRun:
    """What a run left.

    Attributes:
        checkpoint: the newest complete one.
        adapted: the trained model on the meta device: its parts, its names, what was selected.
        trained: name in the adapted model -> place of the tensor that trained.
    """

    path: Path
    config: RunConfig
    checkpoint: Path
    adapted: Adapted
    trained: dict[str, Stored]
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
    trained = read_header(checkpoint / TRAINED_FILE)
    adapted = build(config, "meta")
    expected = {name: tuple(parameter.shape) for name, parameter in adapted.trainable().items()}
    for name in sorted(expected.keys() | trained.keys()):
        found = trained[name].shape if name in trained else None
        if found != expected.get(name):
            raise UserError(
                f"{str(trained[name].file if found else checkpoint)!r} does not fit {RUN_FILE}: {name} is "
                f"{_shape(found)} in it, not {_shape(expected.get(name))}"
            )
        if trained[name].dtype not in DTYPES:
            raise UserError(f"{str(trained[name].file)!r}: {name} has type {trained[name].dtype}, which nothing trains")
    return FinishedRun(path, config, checkpoint, adapted, trained, tuple(folder.damaged))


def base_folder(run: FinishedRun) -> Path:
    """The folder of the base checkpoint: of a packed base, the one that was packed; of one on the hub, where it was
    downloaded to, now or before.

    Raises:
        UserError: the run began with random weights, or the base cannot be had.
    """
    if run.config.model.weights == "random":
        raise UserError(
            f"the run in {str(run.path)!r} began with random weights (model.weights: random): no checkpoint holds "
            "them, so there is no base to export for"
        )
    source = resolve(run.config.model.path)
    if source.folder is None:
        raise UserError(f"model {source.name!r} has no weights that could be loaded")
    if is_packed_base(source.folder):
        original = source_of(Path(source.folder))
        if not original.is_dir():
            raise UserError(
                f"model.path: {source.folder!r} is a packed base; an export needs the checkpoint that was packed, and "
                f"{str(original)!r} is gone"
            )
        return original
    if Path(source.folder).is_dir():
        return Path(source.folder)
    try:
        return Path(snapshot_download(source.folder, allow_patterns=["*.safetensors", *CARRIED]))
    except Exception as error:  # no network, gated, removed: all end here
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"the weights of {source.name!r} cannot be had from the hub: {reason}") from None


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
