"""`moetune.apply_delta`: a copy of a base checkpoint with a delta's tensors in their places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moetune.adapt.weights.base import checkpoint_of, folder_of
from moetune.adapt.weights.quantized_base import is_quantized_base
from moetune.errors import UserError
from moetune.exporting.folder import keep_apart, new_folder, refuse_unfit, write_manifest
from moetune.exporting.merged import copy_checkpoint
from moetune.files import expanded
from moetune.models.hub.delta_folder import Delta, read_delta
from moetune.models.hub.fingerprint import Base, take_fingerprint
from moetune.models.hub.quantized import open_checkpoint
from moetune.models.hub.tensor_files import Stored, read_checkpoint
from moetune.models.source import find_model_source
from moetune.run.source_quantization import read_quantized_manifest


@dataclass(frozen=True)
class Applied:
    """What was written where; `forced` is how the base differs from the one that the delta was made for."""

    out: str
    tensors: int
    bytes: int
    forced: str | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"schema": 1, **asdict(self)}


def apply_delta(
    delta: Path | str,
    to: Path | str,
    out: Path | str,
    *,
    force: str | None = None,
    overwrite: bool = False,
    on_read: Callable[[float], None] | None = None,
) -> Applied:
    """Write a copy of a base checkpoint with a delta's tensors in their places, each in the base's dtype.

    Args:
        to: the base: a folder, or a catalog name or hub id whose weights are on this machine.
        out: the folder to write; it appears when it is whole.
        force: the name of the base's folder, else its catalog name or hub id, to apply the delta although it was made
            for another checkpoint.
        overwrite: replace an earlier export in `out`.
        on_read: called with the share of the work that is done; the base is read twice.

    Raises:
        UserError: there is no delta or no base; the delta was made for another base, or has tensors that this one has
            not, or of another shape; `out` is occupied, or its disk too small; the base changed while it was copied.
            Nothing is written then.
    """
    delta, out = expanded(delta), Path(out)
    if not delta.is_dir():
        raise UserError(f"delta {str(delta)!r} does not exist")
    base, name = _find_base(str(to))
    keep_apart(out, "read", delta, base)
    read, places = read_delta(delta), open_checkpoint(base)
    size, done = sum(tensor.nbytes for tensor in read_checkpoint(base).values()), 0
    needed = sum(tensor.nbytes for tensor in places.values())
    refuse_unfit(out, overwrite, needed)

    def on_block(count: int) -> None:
        nonlocal done
        done += count
        if on_read is not None:
            on_read(done / (2 * size))

    fingerprint = take_fingerprint(base, on_read=on_block)
    difference = read.base.fingerprint.difference(fingerprint)
    if difference is not None and force != name:
        wrong = "" if force is None else f"--force {force!r} is not its name; "
        raise UserError(
            f"the delta in {str(delta)!r} was made for another base than {str(to)!r}: {difference}; "
            f"{wrong}--force {name} applies it all the same"
        )
    _refuse_misfits(read, places, base)
    with new_folder(out, overwrite, needed) as folder:
        copied, copies = copy_checkpoint(base, folder, on_block)
        changed = fingerprint.difference(copied)
        if changed is not None:
            raise UserError(f"{str(to)!r} changed while it was copied: {changed}; run this again when it is at rest")
        for key, tensor in read.tensors.items():
            rows = read.slices.get(key)
            for start, stop in tensor.blocks() if rows is None else ((slot, slot + 1) for slot in range(len(rows))):
                copies[key].write(tensor.rows(start, stop), start if rows is None else rows[start])
        of_base = Base(name, fingerprint).to_json()
        write_manifest(folder, {"format": "applied", **read.about, "base": of_base, "forced": difference})
    changed_bytes = sum(places[key].nbytes for key in read.tensors)
    return Applied(str(out), len(read.tensors), changed_bytes, difference, tuple(_notes(difference, force, name)))


def _notes(difference: str | None, force: str | None, name: str) -> Iterator[str]:
    if difference is not None:
        yield f"applied to another base than it was made for: {difference}"
    elif force is not None and force != name:
        yield f"--force {force!r} is not the name of the base ({name}); it was not needed: the delta was made for it"


def _refuse_misfits(delta: Delta, places: Mapping[str, Stored], base: Path) -> None:
    for key, tensor in delta.tensors.items():
        place, rows = places.get(key), delta.slices.get(key)
        if place is not None and rows is None and tensor.shape == place.shape:
            continue
        if place is not None and rows and tensor.row_shape == place.row_shape and max(rows) < place.num_rows:
            continue
        there = "missing" if place is None else f"{[*place.shape]}"
        raise UserError(f"{key} of the delta is {[*tensor.shape]} and {there} in {str(base)!r}")


def _find_base(to: str) -> tuple[Path, str]:
    """Return the folder and the name of the base."""
    base = expanded(to)
    if not base.is_dir():
        source = find_model_source(to)
        if folder_of(source) is None:
            raise UserError(f"--to {to!r}: its weights are not on this machine; download it first, or give a folder")
        return checkpoint_of(source), source.name
    if is_quantized_base(str(base)):
        raise UserError(
            f"--to {to!r} is a quantized base; give the checkpoint that it was made from: "
            f"{str(read_quantized_manifest(base).source)!r}"
        )
    return base, base.resolve().name
