"""The checkpoint that a model's frozen weights come from: where it is, and which one exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from moetune.adapt.build import Adapted, build
from moetune.adapt.weights.quantized_base import is_quantized_base
from moetune.errors import UserError
from moetune.models.hub.fingerprint import Base, Fingerprint, headers, take_fingerprint, taking_fingerprint
from moetune.models.hub.snapshot import download, downloaded
from moetune.models.source import ModelSource
from moetune.parallel.ranks import SINGLE_RANK, Ranks
from moetune.run.resolve import ResolvedModel, ResolvedRun
from moetune.run.source_quantization import read_quantized_manifest


def checkpoint_of(source: ModelSource) -> Path:
    """The folder of the checkpoint behind a model: of a packed base, the one that was packed; of one on the hub,
    where it was downloaded to, now or before.

    Raises:
        UserError: it cannot be had.
    """
    if source.folder is None:
        raise UserError(f"model {source.name!r} has no weights that could be loaded")
    if is_quantized_base(source.folder):
        original = read_quantized_manifest(Path(source.folder)).source
        if not original.is_dir():
            raise UserError(
                f"model.path: {source.folder!r} is a packed base; an export needs the checkpoint that was packed, and "
                f"{str(original)!r} is gone"
            )
        return original
    return Path(source.folder) if Path(source.folder).is_dir() else download(source.folder)


@contextmanager
def noting_base(model: ResolvedModel, ranks: Ranks = SINGLE_RANK) -> Iterator[Callable[[], Base | None]]:
    """Takes the fingerprint of the base while the body of the `with` loads it. Ranks share its files.

    What is yielded waits for the fingerprint, and is to be called when the weights have been loaded, which may have
    downloaded them. It gives None for random weights. That of a packed base was taken when it was packed.
    """
    source = model.source
    if model.config.weights == "random":
        yield lambda: None
        return
    if is_quantized_base(source.folder):
        packed = read_quantized_manifest(Path(str(source.folder))).packed
        yield lambda: packed
        return
    before = folder_of(source)
    part = (ranks.rank, ranks.parallel.ranks)

    def whole(mine: Fingerprint) -> Fingerprint:
        files: dict[str, str] = {}
        for its in ranks.gather(dict(mine.files)):
            files |= its
        return Fingerprint(mine.tensors, files)

    with ExitStack() as stack:
        taken = None if before is None else stack.enter_context(taking_fingerprint(before, part))

        def noted() -> Base:
            folder = folder_of(source)
            if folder is None:
                raise UserError(f"the weights of {source.name!r} were loaded and cannot be found: no folder holds them")
            if taken is not None and folder == before:
                return Base(source.name, whole(taken()))
            return Base(source.name, whole(take_fingerprint(folder, part=part)))

        yield noted


def build_noting(
    run: ResolvedRun,
    device: torch.device,
    on_read: Callable[[float], None] | None = None,
    ranks: Ranks = SINGLE_RANK,
) -> tuple[Adapted, Base | None]:
    """Build the adapted model, and note which base was read for it; None for random weights."""
    with noting_base(run.model, ranks) as noted:
        return build(run, device, on_read, ranks), noted()


def refuse_changed_base(noted: Base, found: Fingerprint, what: str, where: str) -> None:
    """Raise `UserError` if the base in `where` is not the one that `what` was trained on."""
    difference = noted.fingerprint.difference(found)
    if difference is not None:
        raise UserError(
            f"the base in {where!r} has changed since {what} was trained on it: {difference}; put back the checkpoint "
            "that it was"
        )


def refuse_other_headers(made_for: Base, model: ResolvedModel, what: str) -> None:
    """Compares as much of the base as can be read before it is loaded: all of it, if it is packed.

    Raises:
        UserError: it is another checkpoint than `what` was made for.
    """
    source = model.source
    difference = None
    if is_quantized_base(source.folder):
        difference = made_for.fingerprint.difference(
            read_quantized_manifest(Path(str(source.folder))).packed.fingerprint
        )
    elif (folder := folder_of(source)) is not None:
        difference = made_for.fingerprint.difference_of_tensors(headers(folder))
    if difference is not None:
        raise UserError(f"{what} was made for another base than {model.config.path!r}: {difference}")


def folder_of(source: ModelSource) -> Path | None:
    """Where a model's weights are on this machine."""
    if source.folder is None:
        return None
    folder = Path(source.folder)
    return folder if folder.is_dir() else downloaded(source.folder)
