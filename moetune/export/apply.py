"""The apply command's work: a copy of a base checkpoint with a delta's tensors in their places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moetune.adapt.packed_base import is_packed_base, read_manifest
from moetune.errors import UserError
from moetune.export.base_copy import copy_checkpoint
from moetune.export.folder import new_folder, refuse_unfit, write_manifest
from moetune.hub.delta_folder import Delta, read_delta
from moetune.hub.fingerprint import Base, take_fingerprint
from moetune.hub.tensor_files import Stored, read_checkpoint

_FORMAT = "applied"


@dataclass(frozen=True)
class Applied:
    """What was written where. `forced` is how the base differs from the one that the delta was made for."""

    out: str
    tensors: int
    bytes: int
    forced: str | None

    def to_json(self) -> dict[str, Any]:
        return {"schema": 1, **asdict(self)}


def apply_delta(
    delta: Path,
    base: Path,
    out: Path,
    *,
    force: str | None = None,
    overwrite: bool = False,
    on_read: Callable[[float], None] | None = None,
) -> Applied:
    """Writes a copy of the checkpoint in `base` with a delta's tensors in their places, each in the base's dtype.

    Args:
        out: the folder to write; it appears when it is whole.
        force: the name of the folder `base`, to apply the delta although it was made for another checkpoint.
        overwrite: replace what an export left in `out`.
        on_read: is told, again and again, which share of the work is done: the base is read twice.

    Raises:
        UserError: there is no delta or no base, the delta was made for another base, or has tensors that this one has
            not, or not so shaped; `out` is occupied, or its disk too small. Nothing has been written then.
    """
    delta, base = delta.expanduser(), base.expanduser()
    if not delta.is_dir():
        raise UserError(f"delta {str(delta)!r} does not exist")
    _refuse_no_checkpoint(base)
    _keep_apart(out, delta, base)
    read, places = read_delta(delta), read_checkpoint(base)
    size, done = sum(tensor.nbytes for tensor in places.values()), 0
    refuse_unfit(out, overwrite, size)

    def on_block(count: int) -> None:
        nonlocal done
        done += count
        if on_read is not None:
            on_read(done / (2 * size))

    fingerprint = take_fingerprint(base, on_read=on_block)
    difference, name = read.base.fingerprint.difference(fingerprint), base.resolve().name
    if difference is not None and force != name:
        raise UserError(
            f"the delta in {str(delta)!r} was made for another base than {str(base)!r}: {difference}; "
            f"--force {name} applies it all the same"
        )
    _refuse_misfits(read, places, base)
    with new_folder(out, overwrite, size) as folder:
        copy_checkpoint(base, folder, on_block)
        for key, tensor in read.tensors.items():
            place = places[key].within(folder)
            for slot, row in enumerate(read.slices.get(key, range(tensor.num_rows))):
                place.write(tensor.rows(slot, slot + 1), row)
        about = {key: read.manifest.get(key) for key in ("run", "step", "run_file", "selection")}
        write_manifest(
            folder, {"format": _FORMAT, **about, "base": Base(name, fingerprint).to_json(), "forced": difference}
        )
    written = sum(places[key].nbytes for key in read.tensors)
    return Applied(str(out), len(read.tensors), written, difference)


def _refuse_misfits(delta: Delta, places: dict[str, Stored], base: Path) -> None:
    for key, tensor in delta.tensors.items():
        place, rows = places.get(key), delta.slices.get(key)
        fits = place is not None and (
            tensor.shape == place.shape
            if rows is None
            else tensor.row_shape == place.row_shape and max(rows, default=0) < place.num_rows
        )
        if not fits:
            there = "missing" if place is None else f"{[*place.shape]}"
            raise UserError(f"{key} of the delta is {[*tensor.shape]} and {there} in {str(base)!r}")


def _refuse_no_checkpoint(base: Path) -> None:
    if not base.is_dir():
        raise UserError(f"--to {str(base)!r} is no folder; give the folder of the checkpoint that the delta is for")
    if is_packed_base(str(base)):
        raise UserError(
            f"--to {str(base)!r} is a packed base; give the checkpoint that was packed: "
            f"{str(read_manifest(base).source)!r}"
        )


def _keep_apart(out: Path, *kept: Path) -> None:
    """Refuses to write over what is being read, whatever `--overwrite` says."""
    target = out.expanduser().resolve()
    for folder in (path.resolve() for path in kept):
        if target == folder or target in folder.parents:
            raise UserError(f"--out {str(out)!r} holds what is being read; choose another")
