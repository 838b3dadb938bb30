"""`FinishedRun`: trained tensors, configuration and base, from a run folder or memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moetune.adapt.build import Adapted, build
from moetune.adapt.weights.base import refuse_changed_base
from moetune.adapt.weights.published import WEIGHTS
from moetune.config.load import load_run_config
from moetune.config.schema import HardwareConfig, ParallelConfig, RunConfig
from moetune.errors import UserError, counted, first_of
from moetune.files import expanded
from moetune.models.hub.fingerprint import Base, Fingerprint, headers, take_fingerprint
from moetune.run.resolve import ResolvedModel, resolve
from moetune.tensor_files import Held, Stored, read_header, refuse_not_finite
from moetune.training.folder.checkpoint import TRAINED_FILE, parts_of
from moetune.training.folder.run_folder import BASE_FILE, RUN_FILE, RunFolder, step_of
from moetune.training.same_run import beside_weights


@dataclass(frozen=True)
class FinishedRun:
    """The result of a training run, as exports and inference read it.

    For a model in memory, `path`, `step`, `base` and `folder` are None.

    Attributes:
        path: the run folder.
        config: the run's configuration, as it was trained.
        step: the step of the checkpoint.
        adapted: the adapted model. For a run folder it is on the meta device, without values.
        trained: the trained tensors, by their names in a training checkpoint.
        base: the name and fingerprint of the checkpoint that training started from; None if they were not recorded.
        notes: messages for the user: damaged checkpoints that were skipped, changed files beside the base's weights.
        folder: keeps the checkpoint locked, so that a training process that is still running does not delete it.
    """

    path: Path | None
    config: RunConfig
    step: int | None
    adapted: Adapted
    trained: Mapping[str, Stored | Held]
    base: Base | None
    notes: tuple[str, ...] = ()
    folder: RunFolder | None = None

    def __str__(self) -> str:
        return "the model" if self.path is None else f"the run in {str(self.path)!r}"


def in_memory(adapted: Adapted) -> FinishedRun:
    """Return an adapted model in memory, with its current values, as a run.

    Raises:
        UserError: it is divided over ranks; another trainer has left NaN or infinity in it, or changed more of it than
            the run file chooses, which exports leave out.
    """
    if not adapted.ranks.is_single:
        raise UserError("a model that is distributed over ranks cannot be exported from memory; export its run folder")
    parameters, chosen = adapted.model.named_parameters(), adapted.trainable()
    if others := [name for name, p in parameters if p.requires_grad and chosen.get(name) is not p]:
        raise UserError(
            f"the model trains what its run file does not choose, which an export would leave out: "
            f"{', '.join(first_of(others, 3))}; choose it in adapt: instead, without requires_grad_"
        )
    frozen = [name for name, parameter in chosen.items() if not parameter.requires_grad]
    for name, tensor in adapted.learned().items():
        if not bool(tensor.isfinite().all()):
            raise UserError(
                f"{name} holds values that are not finite (NaN or infinity): training diverged; train again, with a "
                "smaller learning rate or from an earlier checkpoint of the trainer"
            )
    trained = {part.name: Held(part.of(parameter)) for parameter, parts in parts_of(adapted).items() for part in parts}
    trained |= {name: Held(bias) for name, bias in adapted.router_biases().items()}
    notes = [f"{counted(len(frozen), 'chosen tensor')}, as {frozen[0]}, were frozen: did they train?"] if frozen else []
    return FinishedRun(None, adapted.run.config, None, adapted, trained, None, tuple(notes))


def open_run(path: Path) -> FinishedRun:
    """Open the newest undamaged checkpoint of a run folder; with `train.early_stopping`, that of lowest held-out loss.

    Its tensors stay on disk until they are used.

    Raises:
        UserError: `path` is no run folder; it has no undamaged checkpoint, or no record of its base; the model has
            changed; or the checkpoint holds NaN, infinity, or other tensors than the run file trains.
    """
    config = read_own_config(path)
    folder = RunFolder(path)
    path = folder.path
    checkpoint = folder.newest_whole(best=config.train.early_stopping is not None)
    if checkpoint is None and (checkpoints := path.absolute().parent).name == folder.checkpoints_path.name:
        raise UserError(
            f"{str(path)!r} is a checkpoint; give its run, {str(checkpoints.parent)!r}. The newest is taken; for an "
            "earlier one, move those after it out of the folder"
        )
    if checkpoint is None:
        raise UserError(f"the run in {str(path)!r} has no checkpoint yet; train.save_every says when one is written")
    base = folder.base() if config.model.weights == "pretrained" else None
    if base is None and config.model.weights == "pretrained":
        raise UserError(
            f"{str(path / BASE_FILE)!r} is missing, which says what the run was trained on; if model.path "
            f"{config.model.path!r} has not changed, moetune train {path / RUN_FILE} --resume auto records it again"
        )
    trained = read_header(checkpoint / TRAINED_FILE)
    # The checkpoint is whole: the settings by which ranks divided the work do not matter any more.
    alone = config.but(parallel=ParallelConfig(), hardware=HardwareConfig())
    model = expanded(config.model.path)
    if model.is_absolute() and not model.exists():
        raise UserError(
            f"{str(path)!r} was trained on {str(model)!r}, which is not there; put it back, or where it is now as "
            f"model.path in {path / RUN_FILE}"
        )
    adapted = build(resolve(alone, "cuda"), "meta")
    notes = refuse_changed_model(folder, adapted.run.model)
    expected = {
        part.name: tuple(parameter.shape if part.row is None else parameter.shape[1:])
        for parameter, parts in parts_of(adapted).items()
        for part in parts
    }
    expected |= {name: tuple(bias.shape) for name, bias in adapted.router_biases().items()}
    shapes = {name: tensor.shape for name, tensor in trained.items()}
    for name in sorted(expected.keys() | shapes.keys()):
        if shapes.get(name) != expected.get(name):
            actual, wanted = (str([*side[name]]) if name in side else "not there" for side in (shapes, expected))
            raise UserError(
                f"{str(checkpoint / TRAINED_FILE)!r} does not fit {RUN_FILE}: {name} is {actual} in it, not {wanted}"
            )
        if trained[name].dtype not in WEIGHTS:
            raise UserError(f"{str(trained[name].file)!r}: {name} has type {trained[name].dtype}, which no run writes")
    refuse_not_finite(trained)
    notes = [*(f"skipping damaged {reason}" for reason in folder.damaged), *notes]
    if checkpoint != folder.checkpoints()[-1] and config.train.early_stopping is not None:
        notes.append(f"taking {checkpoint.name}, which has the lowest held-out loss")
    return FinishedRun(path, config, step_of(checkpoint), adapted, trained, base, tuple(notes), folder)


def read_own_config(path: Path) -> RunConfig:
    """Read the run file in the run folder `path`; raise `UserError` if it has no valid one."""
    path = expanded(path)
    if not path.is_dir():
        raise UserError(f"run folder {str(path)!r} does not exist")
    if not (path / RUN_FILE).is_file():
        raise UserError(f"{str(path)!r} is not a run folder: no {RUN_FILE} in it")
    return load_run_config(path / RUN_FILE)


def refuse_changed_model(folder: RunFolder, model: ResolvedModel) -> list[str]:
    """Compare the configuration and tokenizer now in `model.path` with those that the run recorded.

    Returns:
        Notes about changes that do little or no harm.

    Raises:
        UserError: the configuration or the tokenizer is that of another model.
    """
    where = f"the run in {str(folder.path)!r} is of another model"
    return folder.inputs().refuse_other_model(*beside_weights(model.source.local_folder()), where)


@torch.no_grad()
def fill_trained(adapted: Adapted, run: FinishedRun) -> None:
    """Copy the trained values of `run` into the parameters of `adapted`, converted to their dtypes."""
    for parameter, parts in parts_of(adapted).items():
        for part in parts:
            mine = part.of(parameter)
            mine.copy_(run.trained[part.name].rows().reshape(mine.shape))
    for name, bias in adapted.router_biases().items():
        bias.copy_(run.trained[name].rows())


def base_folder(run: FinishedRun) -> Path:
    """Return the folder of the base checkpoint that a run was trained on.

    Raises:
        UserError: the run began with random weights; the base is missing; or its tensors differ from the recorded ones
            in name, shape or dtype (`confirmed_base` compares all bytes).
    """
    if run.config.model.weights == "random":
        raise UserError(
            f"{run} began with random weights (model.weights: random): no checkpoint holds them, so there is no base "
            "to export for"
        )
    folder = run.adapted.run.model.source.checkpoint()
    if run.base is not None:
        difference = run.base.fingerprint.difference_of_tensors(headers(folder))
        if difference is not None:
            raise UserError(f"the base in {str(folder)!r} has changed since {run} was trained on it: {difference}")
    return folder


def confirmed_base(run: FinishedRun, folder: Path, fingerprint: Fingerprint | None = None) -> Base:
    """Compare the fingerprint of the base in `folder` with the one that the run recorded.

    Args:
        fingerprint: the fingerprint of `folder`, if known; by default the whole folder is read to compute it.

    Returns:
        The name and fingerprint of the base, for the manifest of an export; as now found if the run recorded none.

    Raises:
        UserError: the fingerprints differ.
    """
    fingerprint = fingerprint or take_fingerprint(folder)
    if run.base is None:
        return Base(run.adapted.run.model.source.name, fingerprint)
    refuse_changed_base(run.base, fingerprint, str(run), str(folder))
    return run.base


def manifest_entries(run: FinishedRun) -> dict[str, Any]:
    """Return the entries of a manifest that describe the run: `run` (its name), `step`, `run_file`, and `selection`,
    names of the trained parameters; JSON values."""
    selection = run.adapted.selection
    return {
        "run": None if run.path is None else run.path.resolve().name,
        "step": run.step,
        "run_file": run.config.model_dump(mode="json"),
        "selection": {
            "full": sorted(selection.full),
            "experts": {str(layer): list(ids) for layer, ids in selection.experts.items()},
            "lora_experts": {str(layer): list(ids) for layer, ids in selection.lora_experts.items()},
            "lora_linears": list(selection.lora_linears),
        },
    }
