"""A packed base on disk: what packing makes of a checkpoint, written once and read in a fraction of the time.

A folder of safetensors: one file for each layer's experts, `rest.safetensors` for all else, the model's configuration
and tokenizer, and `packed.json`, written last, which says what was packed and holds the size and SHA-256 of each file.
While a base is read its files are digested by other threads, and one that was changed is refused by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from bitsandbytes.nn import Linear4bit
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from moetune.adapt.pack import fill_bank, make_bank, put_4bit, quantize_linear
from moetune.adapt.weights.materialize import realize
from moetune.config.schema import ModelConfig
from moetune.documents import read_json
from moetune.errors import UserError, reading
from moetune.experts.bank import ExpertBank
from moetune.experts.context import ExpertContext
from moetune.experts.host import stays_on_host
from moetune.files import WriterLock, aside_of, settle, write_whole
from moetune.models.hub.fingerprint import Fingerprint, digesting
from moetune.models.hub.names import find_homes
from moetune.models.hub.quantized import Quantized, open_checkpoint
from moetune.models.hub.snapshot import PACKED_MANIFEST as MANIFEST
from moetune.models.hub.snapshot import copy_small_file, small_files
from moetune.models.selection import Selection
from moetune.parallel.ranks import SINGLE_RANK, Ranks
from moetune.run.resolve import ResolvedModel, ResolvedRun
from moetune.run.source_quantization import QuantizedManifest, read_quantized_manifest

REST = "rest.safetensors"
_BEGUN = ".packed.begun.json"
_THREADS = 4
"""That digest files: one digests about 1.3 GB a second, and a disk may give more."""


def is_quantized_base(folder: str | None) -> bool:
    """Whether a model's folder holds a packed base.

    Raises:
        UserError: one that was begun and not finished.
    """
    if folder is None or (Path(folder) / MANIFEST).is_file():  # written last; a kill may have left the other one
        return folder is not None
    if (Path(folder) / _BEGUN).is_file():
        raise UserError(f"{folder!r} is not a complete packed base; run moetune quantize again to finish it")
    return False


# --- Writing --------------------------------------------------------------------------------------------------------


def layer_file(path: str) -> str:
    """The file of one layer's experts, by the path of the experts module."""
    return f"{path}.safetensors"


def write_bank(folder: Path, path: str, bank: ExpertBank) -> None:
    """Writes one layer's experts, whole or not at all."""
    _write(folder / layer_file(path), {f"{path}.{name}": tensor for name, tensor in bank.named_buffers()})


def write_rest(
    folder: Path, model: PreTrainedModel, experts: Iterable[str], source: Path, plain: PreTrainedModel
) -> None:
    """Writes everything but the modules of experts: what is packed as the model has it, all else as the checkpoint.

    Args:
        source: the folder of the checkpoint.
        plain: the model before it was packed, whose names the checkpoint's are renamed to.
    """
    stored = open_checkpoint(source)
    homes = find_homes(plain, stored)
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in _rest(model, tuple(f"{path}." for path in experts)):
        if tensor.data_ptr() in seen:  # a head that is the embedding is stored once
            continue
        seen.add(tensor.data_ptr())
        keys = homes[name].every_key() if name in homes and tensor.is_floating_point() else []
        if keys and not any(isinstance(stored[key], Quantized) for key in keys):
            held = homes[name].to_model({key: stored[key].rows().reshape(stored[key].shape) for key in keys})
            tensor = held.reshape(tensor.shape)
        tensors[name] = tensor
    _write(folder / REST, tensors)


def begin(folder: Path, model: ResolvedModel, source: Path, weights: Iterable[Path]) -> None:
    """Notes what is being written, or checks that it is what was begun; copies the files that are no weights.

    Raises:
        UserError: the folder holds something else, or what it says of its beginning cannot be read.
    """
    plan = {
        "schema": 1,
        "base": model.config.base,
        "double_quant": model.config.double_quant,
        "gate_up_apart": model.gate_up_apart,
        "source": str(source.resolve()),
        # A source that changes between two attempts would be packed half and half.
        "source_files": {file.name: [(found := file.stat()).st_size, found.st_mtime_ns] for file in weights},
    }
    begun = folder / _BEGUN
    there = [
        file for file in folder.iterdir() if file.name not in (aside_of(begun).name, WriterLock.NAME)
    ]  # that of a start that was killed
    if (folder / MANIFEST).exists() or (there and not begun.is_file()):
        raise UserError(f"--out {str(folder)!r} is not empty; choose another")
    if begun.is_file() and _read_begun(folder) != plan:
        raise UserError(
            f"--out {str(folder)!r} was begun for another model or precision, or the model changed; choose another"
        )
    if not begun.is_file():
        write_whole(begun, json.dumps(plan), aside=aside_of(begun))
    for file in small_files(source):
        copy = folder / file.relative_to(source)
        if os.path.lexists(copy) and (copy.is_symlink() or not file.read_bytes().startswith(copy.read_bytes())):
            raise UserError(f"{str(copy)!r} is in the way: {file.name} of the model belongs there; move it away")
        copy_small_file(file, source, folder)


def finish(folder: Path, packed: Fingerprint, experts: Iterable[str]) -> dict[str, int]:
    """Says that the folder is complete, what was packed, and what is in it."""
    files = sorted([folder / REST, *(folder / layer_file(path) for path in experts)])
    with digesting(files, _THREADS) as digests:
        entries = {file.name: {"bytes": file.stat().st_size, "sha256": digests()[file.name]} for file in files}
    plan = _read_begun(folder)
    del plan["source_files"]
    manifest = {**plan, "fingerprint": packed.to_json(), "files": entries}
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n", aside=aside_of(folder / MANIFEST))
    (folder / _BEGUN).unlink()
    return {"files": len(files), "bytes": sum(file.stat().st_size for file in files)}


def _read_begun(folder: Path) -> dict[str, Any]:
    file = folder / _BEGUN
    return read_json(file, dict[str, Any], remedy=f"delete {str(folder)!r} and run moetune quantize again")


def _rest(model: PreTrainedModel, experts: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    persistent = model.state_dict().keys()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in persistent and not name.startswith(experts):
            yield name, tensor.data
    for path, module in model.named_modules():
        if isinstance(module, Linear4bit):
            weight: Any = module.weight
            for name, tensor in weight.quant_state.as_dict(packed=True).items():
                yield f"{path}.weight.{name}", tensor


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, aside_of(file), metadata={"format": "pt"})
    settle(aside_of(file))
    aside_of(file).rename(file)


# --- Reading --------------------------------------------------------------------------------------------------------


def check_manifest(folder: Path, config: ModelConfig, selection: Selection) -> QuantizedManifest:
    """The manifest of a packed base that serves this run; its files have their sizes, and their bytes are still unread.

    Raises:
        UserError: it does not.
    """
    manifest = read_quantized_manifest(folder)
    for key in ("base", "double_quant"):
        wanted, stored = getattr(config, key), getattr(manifest, key)
        if wanted != stored and not (key == "double_quant" and config.base != "nf4"):
            raise UserError(f"model.{key}: {wanted}, but {str(folder)!r} is packed with {stored}; set it, or pack anew")
    for name, expected in manifest.files.items():
        file, size = folder / name, expected.bytes
        if not file.is_file() or file.stat().st_size != size:
            found = f"has {file.stat().st_size:,} bytes, not {size:,}" if file.is_file() else "is missing"
            raise UserError(f"{str(file)!r} {found}: the packed base is damaged; write it again with moetune quantize")
    if selection.experts:
        raise UserError(
            f"adapt.experts: {str(folder)!r} holds experts packed only; experts that train whole need the original "
            f"checkpoint ({str(manifest.source)!r})"
        )
    return manifest


def read(
    model: PreTrainedModel,
    run: ResolvedRun,
    device: torch.device,
    on_read: Callable[[float], None] | None = None,
    ranks: Ranks = SINGLE_RANK,
    context: ExpertContext | None = None,
) -> None:
    """Fills a model on the meta device from a packed base, in place: of several ranks, each reads its own experts, and
    digests its share of the files.

    Raises:
        UserError: the folder is damaged, or not packed as the run file says.
    """
    folder, config, dtype = Path(str(run.model.source.folder)), run.config.model, run.dtype
    manifest = check_manifest(folder, config, run.selection)
    for layer in run.structure.moe_layers:
        # of meta tensors: banks without contents
        experts = model.get_submodule(layer.experts)
        bank = make_bank(experts, layer, run.selection, config, dtype, device, ranks.placement, context)
        fill_bank(model, layer, bank)
    for path in run.quantized_linears:
        quantize_linear(model, path, config, dtype, torch.device("meta"))
    mine = sorted(manifest.files)[ranks.rank :: ranks.parallel.ranks]
    with digesting([folder / name for name in mine], _THREADS) as digests:
        _fill(model, folder, manifest, dtype, device, on_read)
        found = digests()
    for name in mine:
        if found[name] != manifest.files[name].sha256:
            raise UserError(
                f"{str(folder / name)!r} was changed after it was written: the packed base is damaged; write it again "
                "with moetune quantize"
            )


def _fill(
    model: PreTrainedModel,
    folder: Path,
    manifest: QuantizedManifest,
    dtype: torch.dtype,
    device: torch.device,
    on_read: Callable[[float], None] | None,
) -> None:
    expected = set(model.state_dict())
    banks = {path: module for path, module in model.named_modules() if isinstance(module, ExpertBank)}
    files = [folder / name for name in sorted(manifest.files)]
    size, done = sum(file.stat().st_size for file in files), 0
    stated: dict[str, dict[str, Tensor]] = {}
    for file in files:
        with reading(repr(str(file)), remedy="write it again with moetune quantize"):
            with safe_open(file, "pt", device="cpu") as opened:
                for name in opened.keys():  # noqa: SIM118 (no dict)
                    expected.discard(name)
                    path, _, state = name.partition(".weight.")
                    if state:
                        stated.setdefault(path, {})[state] = opened.get_tensor(name)
                    else:
                        bank = next((bank for path, bank in banks.items() if name.startswith(f"{path}.")), None)
                        _put(model, name, _read_held(opened, name, bank), dtype, device)
            done += file.stat().st_size
            if on_read is not None:
                on_read(done / size)
    with reading(f"the packed linear layers in {str(folder)!r}", remedy="write it again with moetune quantize"):
        for path, state_dict in stated.items():
            linear = cast(Linear4bit, model.get_submodule(path))
            put_4bit(linear, linear.weight.data, state_dict, dtype, device)
    model.tie_weights()
    _complete(model, expected, folder, device)


def _read_held(opened: Any, name: str, bank: ExpertBank | None) -> Tensor:
    """A tensor, or of one with a row for each expert of a layer the rows of those that are here."""
    if bank is None or name.endswith((".nested_code", ".pairs")) or len(bank.held) == bank.expert_shape.num_experts:
        return opened.get_tensor(name)
    rows = opened.get_slice(name)
    each = rows.get_shape()[0] // bank.expert_shape.num_experts
    return torch.cat([rows[expert * each : (expert + 1) * each] for expert in bank.held])


def _complete(model: PreTrainedModel, unread: set[str], folder: Path, device: torch.device) -> None:
    """Computes the buffers that no checkpoint holds; whatever else was not read is an error."""
    state = model.state_dict(keep_vars=True)
    banks = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, ExpertBank))
    lacking = [n for n in sorted(unread) if ".lora." not in n and (state[n].is_meta or n.startswith(banks))]
    if lacking:
        raise UserError(f"{str(folder)!r} lacks {lacking[0]}; write it again with moetune quantize")
    for path, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module._buffers.values() if buffer is not None):
            realize(model, path, device)


def _put(model: PreTrainedModel, name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    there = getattr(module, last)
    if isinstance(module, Linear4bit) and last == "weight":
        module.weight = nn.Parameter(tensor.to(device), requires_grad=False)  # its state comes later
        return
    if there.shape != tensor.shape:
        raise RuntimeError(f"{name} is {[*tensor.shape]}, not {[*there.shape]}")
    if stays_on_host(there):
        there.copy_(tensor)
        return
    tensor = tensor.to(device, there.dtype if there.is_floating_point() else tensor.dtype)
    if last in module._buffers:
        module._buffers[last] = tensor
    else:
        setattr(module, last, nn.Parameter(tensor, requires_grad=False))
