"""The checkpoint of the frozen weights: record its name and fingerprint, compare later.

The fingerprint (models/hub/fingerprint.py) consists of the names, dtypes and shapes of the tensors and the SHA-256 of
each weight file.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from moetune.errors import UserError
from moetune.models.hub.fingerprint import Base, Fingerprint, headers, take_fingerprint, taking_fingerprint
from moetune.parallel.ranks import SINGLE_RANK, Ranks
from moetune.run.resolve import ResolvedModel


@contextmanager
def noting_base(model: ResolvedModel, ranks: Ranks = SINGLE_RANK) -> Iterator[Callable[[], Base | None]]:
    """Compute the fingerprint of the checkpoint in other threads while the `with` block loads its weights.

    Yields a function that waits for the fingerprint and returns the `Base`: None for random weights; for a quantized
    base the original checkpoint, as recorded when that was quantized. Call it inside the block after the weights are
    loaded, because loading may download them; it raises `UserError` if no folder holds them. With several ranks each
    reads a share of the files, and each gets the whole fingerprint.
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
        for of_rank in ranks.gather(dict(mine.files)):
            files |= of_rank
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


def refuse_changed_base(noted: Base, current: Fingerprint, what: str, where: str) -> None:
    """Raise `UserError` if a checkpoint's present fingerprint, `current`, differs from the one recorded in `noted`. The
    message calls what was trained on the checkpoint `what`, and its folder `where`."""
    difference = noted.fingerprint.difference(current)
    if difference is not None:
        raise UserError(
            f"the base in {where!r} has changed since {what} was trained on it: {difference}; restore the original "
            "checkpoint"
        )


def refuse_other_headers(made_for: Base, model: ResolvedModel, what: str) -> None:
    """Raise `UserError` if an adapter or a delta was made for another checkpoint than a run's model; read no weights.

    `made_for` is its base, and `what` names it in the message. Names, dtypes and shapes of tensors are compared; for a
    quantized base also the digests in its manifest. Nothing is compared if the weights are not on this machine yet.
    """
    source = model.source
    difference = None
    if source.quantized_base is not None:
        difference = made_for.fingerprint.difference(source.quantized_base.fingerprint)
    elif (folder := source.local_folder()) is not None:
        difference = made_for.fingerprint.difference_of_tensors(headers(folder))
    if difference is not None:
        raise UserError(f"{what} was made for another base than {model.config.path!r}: {difference}")
