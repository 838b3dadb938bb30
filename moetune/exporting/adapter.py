"""`moetune adapter`: open an adapter and its base, check, convert, merge and compare (layouts: `moetune.adapters`)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moetune.adapters import check as checks
from moetune.adapters.base import AdapterBase, base_of, stacks_of
from moetune.adapters.check import AdapterReport
from moetune.adapters.difference import AdapterDifference, difference
from moetune.adapters.factors import Adapter
from moetune.adapters.files import StoredAdapter, open_adapter, write_adapter
from moetune.adapters.read import Read, read, sure
from moetune.adapters.write import laid_out
from moetune.config.schema import ModelConfig
from moetune.errors import UserError, first_of
from moetune.exporting.folder import keep_apart, new_folder, write_export_manifest
from moetune.exporting.formats.merged import copy_checkpoint
from moetune.exporting.formats.updates import Update, expert_with_lora, linear_with_lora, new_rows, placed, whole
from moetune.files import expanded
from moetune.json_files import Answer
from moetune.models.hub.dequantize import open_checkpoint
from moetune.models.hub.fingerprint import Base
from moetune.models.hub.tensor_files import Held
from moetune.run.resolve import resolve_model
from moetune.run.resolved import ResolvedModel


@dataclass(frozen=True)
class AdapterWritten(Answer):
    """The result of `convert_adapter` and `merge_adapter`.

    Attributes:
        layout: the layout in which the adapter was stored; None without factors on experts.
        reasons: sentences that say what shows that it is in this layout.
        tensors, bytes: number and size of the tensors that hold what the adapter trained.
        notes: messages for the user.
    """

    out: str
    layout: str | None
    reasons: list[str]
    tensors: int
    bytes: int
    notes: list[str]


def check_adapter(
    base: str, adapter: Path | str, *, layout: str | None = None, program: str | None = None
) -> AdapterReport:
    """Check which parts of an adapter take effect on its base, and which programs read its files as they are.

    Args:
        base: a folder, catalog name or hub id; its weights are not needed.
        adapter: the adapter's folder.
        layout: the layout that it is in, one of `moetune.adapters.read.LAYOUTS`; by default it is detected.
        program: one of `moetune.adapters.write.PROGRAMS`; if it does not read the files as they are, that is a problem.

    Raises:
        UserError: base or adapter cannot be read; or the files allow two layouts.
    """
    _, of_base = _open_base(base)
    return checks.check(_open(adapter), of_base, layout, program)


def convert_adapter(
    base: str, adapter: Path | str, program: str, out: Path | str, *, layout: str | None = None, overwrite: bool = False
) -> AdapterWritten:
    """Write an adapter to the folder `out` in the layout of a program, one of `moetune.adapters.write.PROGRAMS`.

    `base` is a folder, catalog name or hub id, `adapter` a folder, and `layout` the layout that it is in (None: it is
    detected). `overwrite` replaces an earlier export in `out`.

    Raises:
        UserError: base or adapter cannot be read; the adapter's layout is in doubt, or a part of it matches nothing in
            the base or has no place in the program's layout; or `out` is occupied. Nothing is written then.
    """
    out, stored = Path(out), _open(adapter)
    _, of_base = _open_base(base)
    found = _read_whole(stored, of_base, layout)
    keep_apart(out, "converted", stored.folder)
    laid = laid_out(found.adapter, of_base, program)
    named = stored.settings.get("base_model_name_or_path")
    laid.settings["base_model_name_or_path"] = named if isinstance(named, str) and named else base
    with new_folder(out, overwrite) as folder:
        size = write_adapter(folder, laid.tensors, laid.settings, laid.record())
    return AdapterWritten(str(out), found.layout, found.reasons, len(laid.tensors), size, list(laid.notes))


def merge_adapter(
    base: str, adapter: Path | str, out: Path | str, *, layout: str | None = None, overwrite: bool = False
) -> AdapterWritten:
    """Write the base checkpoint to the folder `out` with the adapter in it: W + scale·B·A, in float32.

    All other bytes are those of the base; a base that is published quantized is written dequantized, in 16 bits.
    `base` is a folder, catalog name or hub id, and `layout` the layout that the adapter is in (None: it is detected).
    `overwrite` replaces an earlier export in `out`.

    Raises:
        UserError: the base has no weights on this machine; the adapter cannot be read, its layout is in doubt, or a
            part of it matches nothing in the base; or `out` is occupied. Nothing is written then.
    """
    out, stored = Path(out), _open(adapter)
    model, of_base = _open_base(base)
    source = model.source.checkpoint()
    found = _read_whole(stored, of_base, layout)
    keep_apart(out, "merged", stored.folder, source)
    tensors = open_checkpoint(source)
    targets = placed(model, _updates(found.adapter, of_base), tensors)
    changed: set[str] = set()
    with new_folder(out, overwrite, sum(tensor.nbytes for tensor in tensors.values())) as folder:
        fingerprint, places = copy_checkpoint(source, folder)
        for update, mapping in targets:
            for key, start, rows in new_rows(update, mapping, tensors):
                places[key].write(rows, start)
                changed.add(key)
        of = Base(model.source.name, fingerprint).to_json()
        write_export_manifest(folder, {"format": "merged", "adapter": stored.folder.resolve().name, "base": of})
    size = sum(tensors[key].nbytes for key in changed)
    return AdapterWritten(str(out), found.layout, found.reasons, len(changed), size, [])


def diff_adapters(
    a: Path | str, b: Path | str, *, base: str | None = None, layouts: tuple[str | None, str | None] = (None, None)
) -> AdapterDifference:
    """Find where the updates of two adapters of one base differ.

    Args:
        a, b: the folders of the adapters.
        base: a folder, catalog name or hub id; by default what the first adapter names.
        layouts: the layouts that the two are in, each one of `moetune.adapters.read.LAYOUTS` or None to be detected.

    Raises:
        UserError: base or an adapter cannot be read, or an adapter's files allow two layouts; or `a` names no base.
    """
    first, second = _open(a), _open(b)
    named = base or first.settings.get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise UserError(f"{first} names no base; give --base")
    _, of_base = _open_base(named)
    read_both = [read(one, of_base, layout) for one, layout in zip((first, second), layouts, strict=True)]
    return difference(of_base, read_both[0].adapter, read_both[1].adapter, (str(a), str(b)))


def _open(adapter: Path | str) -> StoredAdapter:
    """Open an adapter's folder; raise `UserError` if there is none, or it holds no adapter."""
    folder = expanded(adapter)
    if not folder.is_dir():
        raise UserError(f"adapter {str(folder)!r} does not exist")
    return open_adapter(folder)


def _open_base(base: str) -> tuple[ResolvedModel, AdapterBase]:
    """Resolve the model `base` without its weights; also return it as what adapters are read against: its structure
    and the tensor names of its checkpoint."""
    model = resolve_model(ModelConfig.named(base), "cpu")
    return model, base_of(model.source, model.plain, model.structure, base)


def _read_whole(stored: StoredAdapter, base: AdapterBase, layout: str | None) -> Read:
    """Read an adapter in `layout`, None to detect it; `UserError` if that is in doubt, or a part matches nothing in the
    base."""
    found = read(stored, base, layout)
    if layout is None:
        sure(found, stored)
    doubts = [line for line in found.problems if "looks like" not in line] if layout else found.problems
    if doubts:
        lines = "\n  ".join(first_of(doubts))
        raise UserError(f"{stored} does not fit {base.name!r}, so a part of it would be lost:\n  {lines}")
    return found


def _updates(adapter: Adapter, base: AdapterBase) -> Iterator[Update]:
    """Yield the updates that an adapter makes to parameters of its base, as transformers names them; experts whose B
    is zero are left out."""
    for path, factors in adapter.linears.items():
        A, B = Held(factors.A), Held(factors.B)
        yield Update(f"{path}.weight", None, True, partial(linear_with_lora, A, B, factors.scale))
    for path, projections in adapter.experts.items():
        layer = base.layers[path]
        for name, stack in stacks_of(layer).items():
            if (own := projections.get(name)) is None:
                continue
            for expert in range(layer.shape.num_experts):
                if own.B[expert].any():
                    A, B = Held(own.A[expert, None]), Held(own.B[expert, None])
                    rows = partial(expert_with_lora, layer, stack, A, B, (slice(None),), own.scale)
                    yield Update(f"{path}.{stack}", expert, True, rows)
    for name, tensor in adapter.saved.items():
        first = base.structure.tied.get(name, name)
        yield Update(first, None, False, partial(whole, Held(tensor)), tensor.dtype)
