"""Which checkpoint exactly a model's frozen weights come from, noted while it is read and compared later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from moetune.adapt.build import Adapted, build
from moetune.errors import UserError
from moetune.models.hub.fingerprint import Base, Fingerprint, headers, take_fingerprint, taking_fingerprint
from moetune.parallel.ranks import SINGLE_RANK, Ranks
from moetune.run.resolve import ResolvedModel, ResolvedRun


@contextmanager
def noting_base(model: ResolvedModel, ranks: Ranks = SINGLE_RANK) -> Iterator[Callable[[], Base | None]]:
    """Take the fingerprint of the base while the body of the `with` loads it. Ranks share its files.

    What is yielded waits for the fingerprint, and is to be called when the weights have been loaded, which may have
    downloaded them. It gives None for random weights. That of a quantized base was taken when it was quantized.
    """
    source = model.source
    if model.config.weights == "random" or source.quantized_base is not None:
        manifest = source.quantized_base if model.config.weights != "random" else None
        yield lambda: None if manifest is None else manifest.original
        return
    before = source.local_folder()
    part = (ranks.rank, ranks.parallel.ranks)

    def whole(mine: Fingerprint) -> Fingerprint:
        files: dict[str, str] = {}
        for its in ranks.gather(dict(mine.files)):
            files |= its
        return Fingerprint(mine.tensors, files)

    with ExitStack() as stack:
        taken = None if before is None else stack.enter_context(taking_fingerprint(before, part))

        def noted() -> Base:
            folder = source.local_folder()
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
    """Compare as much of the base as can be read before it is loaded: all of a quantized base's manifest.

    Raises:
        UserError: it is another checkpoint than `what` was made for.
    """
    source = model.source
    difference = None
    if source.quantized_base is not None:
        difference = made_for.fingerprint.difference(source.quantized_base.fingerprint)
    elif (folder := source.local_folder()) is not None:
        difference = made_for.fingerprint.difference_of_tensors(headers(folder))
    if difference is not None:
        raise UserError(f"{what} was made for another base than {model.config.path!r}: {difference}")
