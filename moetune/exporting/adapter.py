"""`moetune adapter`: open an adapter and its base, check, convert, merge and compare."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moetune.adapters import check as checks
from moetune.adapters.base import AdapterBase, base_of, named_base, of_another_base, stacks_of
from moetune.adapters.check import AdapterReport
from moetune.adapters.difference import AdapterDifference, difference
from moetune.adapters.factors import Adapter
from moetune.adapters.files import CHAT_TEMPLATE_FILE, StoredAdapter, added_tokens, open_adapter, write_adapter
from moetune.adapters.read import Read, read, sure
from moetune.adapters.write import laid_out
from moetune.atomic import new_folder
from moetune.config.schema import ModelConfig
from moetune.errors import UserError, first_of
from moetune.exporting.folder import keep_apart, write_export_manifest
from moetune.exporting.writers.merged import complete_config, copy_checkpoint
from moetune.exporting.writers.updates import Update, new_rows, of_expert, of_linear, of_whole, placed, write_updates
from moetune.files import expanded
from moetune.formats.checkpoint import open_checkpoint
from moetune.json_files import Answer
from moetune.models.hub.fingerprint import Base
from moetune.models.hub.key_mapping import key_mappings
from moetune.models.hub.snapshot import copy_small_file
from moetune.run.resolve import resolve_model, untied_model
from moetune.run.resolved import ResolvedModel
from moetune.tensor_files import Held, Stored


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
    model, of_base = _open_base(base)
    parsed = _read_whole(stored, of_base, layout)
    keep_apart(out, "converted", stored.folder, *model.source.local_folders())
    laid = laid_out(parsed.adapter, of_base, program)
    laid.settings["base_model_name_or_path"] = named_base(stored) or base
    laid.settings["revision"] = stored.settings.get("revision")
    with new_folder(out, overwrite) as folder:
        size = write_adapter(folder, laid.tensors, laid.settings, laid.record())
        _copy_template(stored, folder)
    notes = [*laid.notes, *of_another_base(stored, base, model.source)]
    return AdapterWritten(str(out), parsed.layout, parsed.reasons, len(laid.tensors), size, notes)


def merge_adapter(
    base: str, adapter: Path | str, out: Path | str, *, layout: str | None = None, overwrite: bool = False
) -> AdapterWritten:
    """Write the base checkpoint to the folder `out` with the adapter in it: W + scale·B·A, in float32.

    All other bytes are those of the base; a base that is published quantized is written dequantized, in 16 bits.
    `base` is a folder, catalog name or hub id, and `layout` the layout that the adapter is in (None: it is detected).
    `overwrite` replaces an earlier export in `out`.

    Raises:
        UserError: the base has no weights on this machine; the adapter cannot be read, its layout is in doubt, a part
            of it matches nothing in the base, or it was made on another base; or `out` is occupied. Nothing is written
            then.
    """
    out, stored = Path(out), _open(adapter)
    model, of_base = _open_base(base)
    source = model.source.checkpoint()
    parsed = _read_whole(stored, of_base, layout)
    keep_apart(out, "merged", stored.folder, *model.source.local_folders())
    tensors = open_checkpoint(source)
    added: dict[str, Stored] = {}
    if parsed.adapter.unties(model.structure.tied):
        model, added = _taken_apart(model, tensors)
        tensors |= added
    _refuse_other_values(stored, parsed.frozen, model, tensors)
    targets = placed(model, _updates(parsed.adapter, of_base, model.structure.tied), tensors)
    with new_folder(out, overwrite, sum(tensor.nbytes for tensor in tensors.values())) as folder:
        fingerprint, output = copy_checkpoint(source, folder, added=added)
        changed = write_updates(targets, tensors, output)
        _copy_template(stored, folder)
        notes = [*complete_config(folder, tensors), *of_another_base(stored, base, model.source)]
        notes += _of_more_tokens(stored, folder)
        origin = Base(model.source.name, fingerprint).to_json()
        write_export_manifest(folder, {"format": "merged", "adapter": stored.folder.resolve().name, "base": origin})
    size = sum(tensors[key].nbytes for key in changed)
    return AdapterWritten(str(out), parsed.layout, parsed.reasons, len(changed), size, notes)


def diff_adapters(
    a: Path | str, b: Path | str, *, base: str | None = None, layouts: tuple[str | None, str | None] = (None, None)
) -> AdapterDifference:
    """Find where the updates of two adapters of one base differ.

    Args:
        a, b: the folders of the adapters.
        base: a folder, catalog name or hub id; by default what the first adapter names.
        layouts: the layouts that the two are in, each one of `moetune.adapters.read.LAYOUTS` or None to be detected.

    Raises:
        UserError: base or an adapter cannot be read, or an adapter's files allow two layouts; a part of an adapter
            matches nothing in the base, or there is nothing to compare; or `a` names no base.
    """
    first, second = _open(a), _open(b)
    named = base or named_base(first)
    if named is None:
        raise UserError(f"{first} names no base; give --base")
    _, of_base = _open_base(named)
    read_both = [read(stored, of_base, layout) for stored, layout in zip((first, second), layouts, strict=True)]
    for stored, parsed in zip((first, second), read_both, strict=True):
        if parsed.unread:
            lines = "\n  ".join(first_of(parsed.unread))
            raise UserError(f"{stored} does not fit {named!r}, so a part of it would not be compared:\n  {lines}")
    diff = difference(of_base, read_both[0].adapter, read_both[1].adapter, (str(a), str(b)))
    if diff.equal and not diff.compared:
        raise UserError(f"there is nothing to compare: neither {first} nor {second} has an update that is not zero")
    return diff


def _open(adapter: Path | str) -> StoredAdapter:
    """Open an adapter's folder; raise `UserError` if there is none, or it holds no adapter."""
    folder = expanded(adapter)
    if not folder.is_dir():
        raise UserError(f"adapter {str(folder)!r} {'is no folder' if folder.exists() else 'does not exist'}")
    return open_adapter(folder)


def _open_base(base: str) -> tuple[ResolvedModel, AdapterBase]:
    """Resolve the model `base` without its weights; also return it as what adapters are read against: its structure
    and the tensor names of its checkpoint."""
    model = resolve_model(ModelConfig.named(base), "cpu")
    return model, base_of(model.source, model.plain, model.structure, base)


def _copy_template(stored: StoredAdapter, out: Path) -> None:
    """Copy the chat template that stands beside an adapter which was trained with another one than its base's."""
    if (file := stored.folder / CHAT_TEMPLATE_FILE).is_file():
        copy_small_file(file, stored.folder, out)


def _of_more_tokens(stored: StoredAdapter, out: Path) -> list[str]:
    """Return a note if the tokenizer beside an adapter has added tokens that the one of the base, in `out`, lacks."""
    own, of_base = added_tokens(stored.folder), added_tokens(out)
    if of_base is None or own is None:
        return []
    lacking = f"{len(own - of_base)} of its added tokens"
    return [f"the tokenizer is the base's, and lacks {lacking}: copy that of {stored}"] if own - of_base else []


def _read_whole(stored: StoredAdapter, base: AdapterBase, layout: str | None) -> Read:
    """Read an adapter in `layout`, None to detect it; `UserError` if that is in doubt, or a part matches nothing in the
    base."""
    parsed = read(stored, base, layout)
    if layout is None:
        sure(parsed, stored)
    if problems := [*parsed.unread, *parsed.wrong]:
        lines = "\n  ".join(first_of(problems))
        raise UserError(f"{stored} does not fit {base.name!r}, so a part of it would be lost:\n  {lines}")
    return parsed


def _taken_apart(model: ResolvedModel, tensors: Mapping[str, Stored]) -> tuple[ResolvedModel, dict[str, Stored]]:
    """Return a model untied, and the tensors that its checkpoint then lacks: name -> that of the tied weight.

    Raises `UserError` if transformers would not find one of them.
    """
    apart = untied_model(model)
    mappings, added = key_mappings(apart.plain, tensors), {}
    for name, first in model.structure.tied.items():
        held, lacking = (first, name) if first in mappings else (name, first)
        if held not in mappings:
            raise UserError(f"the base checkpoint has no tensors for {first}")
        if lacking not in mappings:
            added[lacking] = tensors[mappings[held].every_key()[0]]
    lost = added.keys() - key_mappings(apart.plain, added).keys()
    if lost:
        raise UserError(f"the adapter unties {min(lost)}, for which checkpoints of {model.source.name!r} have no name")
    return apart, added


def _updates(adapter: Adapter, base: AdapterBase, tied: Mapping[str, str]) -> Iterator[Update]:
    """Yield the updates that an adapter makes to parameters of its base, as transformers names them; those whose B is
    zero are left out. `tied` is second name of a tied parameter -> its first name."""
    for path, factors in adapter.linears.items():
        if factors.B.any():
            yield of_linear(path, Held(factors.A), Held(factors.B), factors.scale)
    for path, projections in adapter.experts.items():
        layer = base.layers[path]
        for name, stack in stacks_of(layer).items():
            if (own := projections.get(name)) is None:
                continue
            for expert in range(layer.shape.num_experts):
                if own.B[expert].any():
                    A, B = Held(own.A[expert, None]), Held(own.B[expert, None])
                    yield of_expert(layer, stack, expert, A, B, (slice(None),), own.scale)
    yield from _whole(adapter.saved, tied)


def _whole(tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> Iterator[Update]:
    """Yield the updates that replace parameters by tensors of their names."""
    for name, tensor in tensors.items():
        yield of_whole(tied.get(name, name), Held(tensor))


def _refuse_other_values(
    stored: StoredAdapter, frozen: Mapping[str, Tensor], model: ResolvedModel, tensors: Mapping[str, Stored]
) -> None:
    """Raise `UserError` if a frozen weight that an adapter stores beside its factors is not the base's.

    Args:
        frozen: name of a parameter of the plain model -> its stored value, which may have been rounded to 16 bits.
        tensors: the tensors of the base checkpoint by name.
    """
    for part, mapping in placed(model, _whole(frozen, model.structure.tied), tensors):
        for key, start, rows in new_rows(part, mapping, tensors):
            base_rows = tensors[key].rows(start, start + len(rows)).float()
            # rounding changes a bfloat16 by 2⁻⁹ of itself, and the smallest float16 by 2⁻²⁵
            if not torch.allclose(rows.float(), base_rows, rtol=2**-8, atol=2**-24):
                raise UserError(
                    f"{stored} was made on another base than {model.source.name!r}: it stores {part.parameter}, which "
                    "is frozen, with other values; give the base that it was trained on"
                )
