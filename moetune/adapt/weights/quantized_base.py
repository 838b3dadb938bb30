"""File format of a quantized base: write, check, and read it into a model.

A quantized base is a checkpoint with weights that `moetune quantize` has quantized, so that loading takes a fraction of
the time. The folder has one safetensors file for each layer's experts, `rest.safetensors` for all other tensors, the
model's configuration and tokenizer, a ledger of these files, and a manifest, `packed.json`, which says what was
quantized and how, with the size and SHA-256 of each weight file. While a base is read, other
threads compute the digests of its files; one that has changed raises `UserError`.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from moetune.adapt.weights.published import finish_reading
from moetune.adapt.weights.random import fill_randomly, realize_buffers
from moetune.adapt.weights.target import LoadTarget
from moetune.compat.bitsandbytes import Linear4bit
from moetune.config.schema import storage_in
from moetune.errors import UserError, reading
from moetune.experts.bank import ExpertBank
from moetune.experts.quantized import QuantizedLinear
from moetune.files import settle
from moetune.formats.base import Quantized
from moetune.formats.checkpoint import open_checkpoint
from moetune.formats.table import format_of
from moetune.models.hub.fingerprint import Fingerprint, digesting
from moetune.models.hub.key_mapping import KeyMapping, key_mappings
from moetune.models.hub.snapshot import QUANTIZED_MANIFEST, copy_small_file, small_files
from moetune.models.quantized_manifest import REST, QuantizedManifest
from moetune.models.stack import AbsentTable, LeftOut
from moetune.models.structure import tied_names
from moetune.parallel.ranks import Ranks
from moetune.run.resolve import ResolvedModel, ResolvedRun
from moetune.tensor_files import Stored, finite

KIND = "quantized base"
"""Kind of the folder in its ledger, `.moetune`."""
_AGAIN = "write it again with moetune quantize"
_THREADS = 4
"""Number of threads that compute digests. One processes about 1.3 GB/s, and a disk may deliver more."""


# --- Writing --------------------------------------------------------------------------------------------------------


def layer_file(path: str) -> str:
    """Return the name of the file with one layer's experts, given the path of the experts module."""
    return f"{path}.safetensors"


def write_bank(folder: Path, path: str, bank: ExpertBank) -> None:
    """Write one layer's experts, all frozen, to their file, which appears under its name only once it is complete."""
    _write(folder / layer_file(path), {f"{path}.{name}": tensor for name, tensor in bank.named_buffers()})


def write_rest(folder: Path, model: PreTrainedModel, source: Path, plain: PreTrainedModel) -> None:
    """Write all tensors of `model`, whose weights are loaded and whose experts are removed, to `rest.safetensors`.

    A tensor that was quantized, or is quantized in the checkpoint `source`, is written as the model has it; any other
    with the checkpoint's values. `plain` is the model on the meta device, as its configuration describes it.
    """
    stored = open_checkpoint(source)
    mappings = key_mappings(plain, stored)
    by_first = {first: mappings[name] for name, first in tied_names(plain).items() if name in mappings}
    _write(folder / REST, rest_of(_tensors(model), stored, by_first | mappings))


def rest_of(
    named: Iterable[tuple[str, Tensor]], stored: Mapping[str, Stored], mappings: Mapping[str, KeyMapping]
) -> dict[str, Tensor]:
    """Return name -> tensor to write for the tensors `named` of a loaded model; of tied weights only the first.

    A floating-point tensor that its checkpoint has unquantized is written with the values there. `stored` are the
    checkpoint's tensors by name; `mappings` say which of them each of the model's parameters is made of.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[int, Any]] = set()
    for name, tensor in named:
        location = id(tensor.untyped_storage()), tensor.storage_offset()
        if location in seen:  # tied weights are stored once
            continue
        seen.add(location)
        keys = mappings[name].every_key() if name in mappings and tensor.is_floating_point() else []
        if keys and not any(isinstance(stored[key], Quantized) for key in keys):
            tensor = mappings[name].to_model(lambda key: stored[key].whole()).reshape(tensor.shape)
        tensors[name] = tensor
    return tensors


def plan(model: ResolvedModel, source: Path, weights: Iterable[Path]) -> dict[str, Any]:
    """Return, as JSON values, what a model's quantized base depends on: the precision, and the checkpoint in the folder
    `source` with its files `weights`, which must not change between two calls that write one base."""
    return {
        "schema": 1,
        **model.config.model_dump(mode="json", include={"base", "double_quant"}),
        "gate_up_apart": model.gate_up_apart,
        "source": str(source.resolve()),
        "source_files": {file.name: [(stat := file.stat()).st_size, stat.st_mtime_ns] for file in weights},
    }


def begin(folder: Path, source: Path, experts: Iterable[str]) -> None:
    """Copy configuration and tokenizer from the checkpoint `source` into the folder of a base that is being written,
    and remove what an interrupted call left there except complete files of layers, whose experts modules are named."""
    complete = {layer_file(path) for path in experts}
    for left in folder.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        elif left.name not in complete:
            left.unlink()
    for file in small_files(source):
        copy_small_file(file, source, folder)


def finish(folder: Path, plan: dict[str, Any], source: Fingerprint, experts: Iterable[str]) -> dict[str, int]:
    """Write the manifest, which completes the quantized base; return `files`, the number of weight files, and their
    total `bytes`. `source` is the fingerprint of the checkpoint, `experts` are the paths of the experts modules of all
    layers."""
    files = sorted([folder / REST, *(folder / layer_file(path) for path in experts)])
    with digesting(files, _THREADS) as digests:
        entries = {file.name: {"bytes": file.stat().st_size, "sha256": digests()[file.name]} for file in files}
    what = {key: value for key, value in plan.items() if key != "source_files"}
    manifest = {**what, "fingerprint": source.to_json(), "files": entries}
    (folder / QUANTIZED_MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return {"files": len(files), "bytes": sum(file.stat().st_size for file in files)}


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all tensors to store except experts, quantization states of 4-bit layers included."""
    yield from plain_tensors(model)
    for path, module in model.named_modules():
        if isinstance(module, Linear4bit):
            weight: Any = module.weight
            for name, tensor in weight.quant_state.as_dict(packed=True).items():
                yield f"{path}.weight.{name}", tensor


def plain_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a model's parameters and persistent buffers that are not on the meta device."""
    persistent = model.state_dict().keys()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in persistent and not tensor.is_meta:
            yield name, tensor.data


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    aside = file.with_suffix(".part")
    save_file(contiguous, aside, metadata={"format": "pt"})
    settle(aside)
    aside.rename(file)


# --- Reading --------------------------------------------------------------------------------------------------------


def check_quantized_base(run: ResolvedRun) -> None:
    """Raise `UserError` if a run's model is a quantized base that the run cannot use; accept any other model.

    Reads no weights. The base must have the precision that `model.base` and `model.double_quant` set, and all files in
    the sizes that the manifest lists. The run may not train whole experts, which the base holds only quantized.
    """
    manifest, config = run.model.source.quantized_base, run.config.model
    if manifest is None:
        return
    folder = Path(str(run.model.source.folder))
    linears = run.structure.linears()
    parts = {(linears[path].component, linears[path].layer) for path in run.quantized_linears}
    parts |= {("experts", layer.index) for layer in run.structure.moe_layers}
    alike = all(
        format_of(config.storage_of(*part), config.double_quant)
        == format_of(storage_in(manifest.base, *part), manifest.double_quant)
        for part in parts
    )
    for key in () if alike else ("base", "double_quant"):
        wanted, stored = getattr(config, key), getattr(manifest, key)
        if wanted != stored:
            raise UserError(
                f"model.{key}: {wanted}, but {str(folder)!r} is quantized with {stored}; set it, or quantize again"
            )
    for name, expected in manifest.files.items():
        file, size = folder / name, expected.bytes
        if not file.is_file() or file.stat().st_size != size:
            damage = f"has {file.stat().st_size:,} bytes, not {size:,}" if file.is_file() else "is missing"
            raise UserError(f"{str(file)!r} {damage}: the quantized base is damaged; {_AGAIN}")
    if run.selection.experts:
        raise UserError(
            f"adapt.experts: {str(folder)!r} holds quantized experts only; fully trained experts need the original "
            f"checkpoint ({str(manifest.source)!r})"
        )


def read_quantized_base(
    target: LoadTarget, run: ResolvedRun, ranks: Ranks, on_read: Callable[[float], None] | None = None
) -> None:
    """Read the quantized base of a run into the target's model.

    Each rank reads only the experts that it holds, and computes the digests of a share of the files. `on_read` is
    called after each file with the fraction of all bytes that has been read (0 to 1). Raises `UserError` if the run
    cannot use the base (`check_quantized_base`), or a file is damaged, lacks a tensor, or differs from its digest.
    """
    check_quantized_base(run)
    manifest, folder = run.model.source.quantized_base, Path(str(run.model.source.folder))
    assert manifest is not None
    fill_randomly(target, draws=False)
    finish_reading(target.model, folder)
    mine = sorted(manifest.files)[ranks.rank :: ranks.parallel.ranks]
    with digesting([folder / name for name in mine], _THREADS) as digests:
        _fill(target, folder, manifest, on_read)
        taken = digests()
    for name in mine:
        if taken[name] != manifest.files[name].sha256:
            raise UserError(
                f"{str(folder / name)!r} was changed after it was written: the quantized base is damaged; {_AGAIN}"
            )


def _fill(
    target: LoadTarget, folder: Path, manifest: QuantizedManifest, on_read: Callable[[float], None] | None
) -> None:
    model = target.model
    unread = set(model.state_dict())
    elsewhere = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, LeftOut | AbsentTable))
    files = [folder / name for name in sorted(manifest.files)]
    size, done = sum(file.stat().st_size for file in files), 0
    in_4bit: dict[str, dict[str, Tensor]] = {}
    for file in files:
        with reading(repr(str(file)), remedy=_AGAIN):
            with safe_open(file, "pt", device="cpu") as opened:
                for name in opened.keys():  # noqa: SIM118 (no dict)
                    if name.startswith(elsewhere):
                        continue
                    unread.discard(name)
                    path, _, state = name.rpartition(".weight")
                    tensor = finite(_read_held(opened, name, target), name, file)
                    module = model.get_submodule(path) if path else None
                    if isinstance(module, Linear4bit):
                        in_4bit.setdefault(path, {})[state.removeprefix(".")] = tensor
                    elif isinstance(module, QuantizedLinear):  # in bf16, of which files have the checkpoint's values
                        target.put_linear(path, tensor.to(target.device))
                        unread.discard(f"{path}.stack.data")
                    else:
                        target.put(name, tensor)
            done += file.stat().st_size
            if on_read is not None:
                on_read(done / size)
    with reading(f"the quantized linear layers in {str(folder)!r}", remedy=_AGAIN):
        for path, parts in in_4bit.items():
            if len(parts) == 1:  # the layer was not quantized when the base was written
                target.put(f"{path}.weight", parts[""])
            else:
                target.put_4bit(path, parts.pop(""), parts)
    model.tie_weights()
    _refuse_unread(model, unread, folder)
    realize_buffers(model, target.device)


def _read_held(opened: Any, name: str, target: LoadTarget) -> Tensor:
    """Return the tensor `name` of an opened safetensors file; of one with rows for all experts of a layer, only the
    rows of the experts on this rank."""
    bank = next((bank for path, bank in target.banks.items() if name.startswith(f"{path}.")), None)
    if bank is None or bank.gate_up.is_table(name) or len(bank.held) == bank.expert_shape.num_experts:
        return opened.get_tensor(name)
    rows = opened.get_slice(name)
    each = rows.get_shape()[0] // bank.expert_shape.num_experts
    return torch.cat([rows[expert * each : (expert + 1) * each] for expert in bank.held])


def _refuse_unread(model: nn.Module, unread: set[str], folder: Path) -> None:
    """Raise `UserError` if a tensor of the model's state, other than LoRA factors, was not in the files."""
    state = model.state_dict(keep_vars=True)
    banks = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, ExpertBank))
    lacking = [n for n in sorted(unread) if ".lora." not in n and (state[n].is_meta or n.startswith(banks))]
    if lacking:
        raise UserError(f"{str(folder)!r} lacks {lacking[0]}; {_AGAIN}")
