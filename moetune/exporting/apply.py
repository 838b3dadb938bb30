"""`apply_delta`: a copy of a base checkpoint with a delta's tensors in it.

A delta is a folder that `moetune export --format delta` wrote: the tensors that trained in full precision.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moetune.atomic import new_folder, refuse_unfit
from moetune.errors import UserError
from moetune.exporting.folder import keep_apart, write_export_manifest
from moetune.exporting.writers.merged import complete_config, copy_checkpoint
from moetune.files import expanded
from moetune.formats.checkpoint import open_checkpoint
from moetune.json_files import Answer
from moetune.models.hub.delta_folder import Delta, read_delta
from moetune.models.hub.fingerprint import Base, take_fingerprint
from moetune.models.quantized_manifest import read_quantized_manifest
from moetune.models.source import ModelSource, find_model_source
from moetune.tensor_files import Stored, read_headers


@dataclass(frozen=True)
class Applied(Answer):
    """The result of `apply_delta`.

    Attributes:
        tensors: the number of tensors in the delta.
        bytes: their size in the written checkpoint; a tensor of which only some rows changed counts whole.
        forced: how the base differs from the base that the delta was made for; None if both are the same.
        notes: messages for the user.
    """

    out: str
    tensors: int
    bytes: int
    forced: str | None
    notes: tuple[str, ...]


def apply_delta(
    delta: Path | str,
    to: Path | str,
    out: Path | str,
    *,
    force: str | None = None,
    overwrite: bool = False,
    on_read: Callable[[float], None] | None = None,
) -> Applied:
    """Write a copy of a base checkpoint with a delta's tensors in place of the base's, converted to the base's dtypes.

    The base is read twice: to compute its fingerprint (the SHA-256 of its files), and to copy it.

    Args:
        delta: the delta's folder.
        to: the base: a folder, or a catalog name or hub id whose weights are on this machine.
        out: the folder to write. It appears under this name only when it is complete.
        force: the name of the base (its folder's name, catalog name or hub id), to apply the delta to it although the
            delta was made for another one.
        overwrite: replace an earlier export in `out`.
        on_read: called after each block with the fraction of the work that is done, from 0 to 1.

    Raises:
        UserError: the delta or the base does not exist; the delta was made for another base and `force` does not name
            this one; a tensor of the delta is missing from the base or has another shape there; `out` is occupied, or
            its disk is too small; the base changed while it was copied. In all these cases nothing is written.
    """
    delta, out = expanded(delta), Path(out)
    if not delta.is_dir():
        raise UserError(f"delta {str(delta)!r} {'is no folder' if delta.exists() else 'does not exist'}")
    base, source, name = _find_base(str(to))
    keep_apart(out, "read", delta, base)
    read, tensors = read_delta(delta), open_checkpoint(base)
    size, done = sum(tensor.nbytes for tensor in read_headers(base).values()), 0
    needed = sum(tensor.nbytes for tensor in tensors.values())
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
            f"{wrong}--force {name} applies it anyway"
        )
    _refuse_misfits(read, tensors, base)
    if difference is not None and source is not None:
        _refuse_other_ties(read, tensors, source)
    with new_folder(out, overwrite, needed) as folder:
        copied, copies = copy_checkpoint(base, folder, on_block)
        changed = fingerprint.difference(copied)
        if changed is not None:
            raise UserError(
                f"{str(to)!r} changed while it was copied: {changed}; run the command again once it no longer changes"
            )
        for key, tensor in read.tensors.items():
            rows = read.slices.get(key)
            for start, stop in tensor.blocks() if rows is None else ((slot, slot + 1) for slot in range(len(rows))):
                copies[key].write(tensor.rows(start, stop), start if rows is None else rows[start])
        notes = complete_config(folder, tensors)
        if difference is not None:
            notes = (f"applied to another base than it was made for: {difference}", *notes)
        elif force not in (None, name):
            unneeded = f"--force {force!r} is not the name of the base ({name}); it was not needed"
            notes = (f"{unneeded}: the delta was made for it", *notes)
        of_base = Base(name, fingerprint).to_json()
        write_export_manifest(folder, {"format": "applied", **read.about, "base": of_base, "forced": difference})
    changed_bytes = sum(tensors[key].nbytes for key in read.tensors)
    return Applied(str(out), len(read.tensors), changed_bytes, difference, notes)


def _refuse_misfits(delta: Delta, tensors: Mapping[str, Stored], base: Path) -> None:
    """Raise `UserError` if the base lacks a tensor of the delta, or has it in another shape.

    If the delta has only some experts' rows of a tensor, each must exist in the base, in the same shape. `tensors` are
    the base's tensors by name, `base` its folder, for the message.
    """
    for key, tensor in delta.tensors.items():
        target, rows = tensors.get(key), delta.slices.get(key)
        if target is not None and rows is None and tensor.shape == target.shape:
            continue
        if target is not None and rows and tensor.row_shape == target.row_shape and max(rows) < target.num_rows:
            continue
        in_base = "missing" if target is None else f"{[*target.shape]}"
        raise UserError(f"{key} of the delta is {[*tensor.shape]} and {in_base} in {str(base)!r}")


def _refuse_other_ties(delta: Delta, tensors: Mapping[str, Stored], source: ModelSource) -> None:
    """Raise `UserError` if the delta holds a table of the vocabulary that is tied to another in one of the two bases
    only, the one that it was made for and `source`, whose tensors are `tensors`: the other would change in one only."""
    rows = getattr(source.config.get_text_config(), "vocab_size", None)
    base_shapes = {name: str([*tensor.shape]) for name, tensor in tensors.items()}
    made_for = {name: kind.partition(" ")[2] for name, kind in delta.base.fingerprint.tensors.items()}
    for name in sorted(base_shapes.keys() ^ made_for.keys()):
        shape = {**base_shapes, **made_for}[name]
        table = next((key for key, tensor in delta.tensors.items() if str([*tensor.shape]) == shape), None)
        if table is not None and shape.startswith(f"[{rows}, "):
            which = "this base" if name in base_shapes else "the base that the delta was made for"
            raise UserError(
                f"{table} of the delta is tied to {name} in one base, and only {which} has a tensor for each; apply it "
                "to the base that it was made for"
            )


def _find_base(to: str) -> tuple[Path, ModelSource | None, str]:
    """Return the folder, source and name of the base `to`, a folder, catalog name or hub id.

    The source of a folder is None if transformers does not know what is in it.

    Raises:
        UserError: the weights are not on this machine, or the folder holds a quantized base that moetune wrote.
    """
    base = expanded(to)
    if not base.is_dir():
        source = find_model_source(to)
        if source.local_folder() is None:
            raise UserError(f"--to {to!r}: its weights are not on this machine; download it first, or give a folder")
        return source.checkpoint(), source, source.name
    if (manifest := read_quantized_manifest(base)) is not None:
        raise UserError(
            f"--to {to!r} is a quantized base; give the checkpoint that it was made from: {str(manifest.source)!r}"
        )
    known = None
    with suppress(UserError):
        known = find_model_source(str(base))
    return base, known, base.resolve().name
