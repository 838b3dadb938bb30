"""`write_merged`: a whole checkpoint, the base with the trained values; `copy_checkpoint`.

Each file of the base is copied byte for byte, then the trained rows are overwritten in place. All other bytes stay
equal to the base's, and only one expert, or one block of a tensor, is in memory at a time. A base that is published in
a quantized format is written dequantized, in 16 bits.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from moetune.errors import UserError, shown
from moetune.exporting.finished_run import FinishedRun, base_folder, confirmed_base, manifest_entries
from moetune.exporting.folder import Written, write_export_manifest
from moetune.exporting.writers.updates import placed, updates, write_updates
from moetune.formats.base import Quantized
from moetune.formats.checkpoint import open_checkpoint
from moetune.formats.source_quantization import SETTINGS_BESIDE, remove_settings
from moetune.json_files import read_json
from moetune.models.hub.fingerprint import Fingerprint, take_fingerprint
from moetune.models.hub.snapshot import copy_small_file, small_files
from moetune.models.source import find_model_source
from moetune.tensor_files import INDEX_FILE, SINGLE_FILE, Stored, create_file


def write_merged(run: FinishedRun, out: Path) -> Written:
    """Write the base checkpoint with a run's trained values to `out`; LoRA is added as W + scale·B·A, in float32.

    Raises:
        UserError: the run began with random weights; the base is missing, has changed since the run, or has no tensor
            for a trained parameter.
    """
    folder = base_folder(run)
    base = open_checkpoint(folder)
    model = run.adapted.run.model
    targets = placed(model, updates(run), base)
    fingerprint, output = copy_checkpoint(folder, out)
    of_base = confirmed_base(run, folder, fingerprint)
    changed = write_updates(targets, base, output)
    notes = complete_config(out, base)
    write_export_manifest(out, manifest_entries(run) | {"format": "merged", "base": of_base.to_json()})
    return Written(len(changed), sum(base[key].nbytes for key in changed), notes)


def complete_config(out: Path, base: Mapping[str, Stored]) -> tuple[str, ...]:
    """Write to the `config.json` in `out` what programs need that go by it alone; return notes for the user.

    `base` are the tensors of the base, if what is quantized there is not in `out`; else it is empty.

    Nothing is tied, if the weights there hold apart what it ties; and keys by which configurations said the same before
    transformers 5 stand beside those of today (seen in mlx-lm 0.32: without `rope_theta` it takes its own default). No
    configuration there names code (`auto_map`), which is not copied: with `trust_remote_code` it would be looked for.
    Only a tokenizer that is nothing but code keeps its name, so that no other is taken for it.
    """
    notes = tuple[str, ...]()
    for file in sorted(out.glob("*config.json")):
        with suppress(UserError):  # those that nothing reads may be damaged
            settings = read_json(file, dict[str, Any])
            code = settings.pop("auto_map", None)
            if code and file.name == "tokenizer_config.json" and not (out / "tokenizer.json").is_file():
                notes += (
                    f"the base's tokenizer is code, {shown(code)}, which is not copied: copy its .py file yourself",
                )
            elif code is not None:
                _write_json(file, settings)
    config = read_json(out / "config.json", dict[str, Any])
    if any(isinstance(tensor, Quantized) for tensor in base.values()):
        notes += ("the base is published quantized; all weights are in 16 bits here, unless by export --into",)
    sections = [section for section in (config, config.get("text_config")) if isinstance(section, dict)]
    for section in sections:
        for key, value in _old_keys(section).items():
            section.setdefault(key, value)
    with suppress(UserError):  # a copy of what transformers does not know
        if find_model_source(str(out)).is_apart:
            for section in sections:
                section["tie_word_embeddings"] = False
            notes += ("the LM head is a tensor of its own; config.json says so now (tie_word_embeddings: false)",)
    if config != read_json(out / "config.json", dict[str, Any]):
        _write_json(out / "config.json", config)
    return notes


def _old_keys(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a section of a configuration says of positions and experts, by the keys before transformers 5."""
    old, rope = dict[str, Any](), section.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:  # else one for each kind of layer, for which there was no key
        old |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        old["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    if section.get("model_type") == "qwen3_moe" and "num_local_experts" in section:
        old["num_experts"] = section["num_local_experts"]
    return old


def bytes_needed(run: FinishedRun) -> int:
    """Return the bytes that the weights of a run's merged checkpoint take on disk."""
    return sum(tensor.nbytes for tensor in open_checkpoint(base_folder(run)).values())


def copy_checkpoint(
    folder: Path,
    out: Path,
    on_read: Callable[[int], None] | None = None,
    added: Mapping[str, Stored] | None = None,
) -> tuple[Fingerprint, dict[str, Stored]]:
    """Copy a checkpoint into the empty folder `out`, block by block. A quantized checkpoint is copied dequantized.

    Args:
        on_read: called with the number of bytes of each block of weights that was read.
        added: further tensors of `out`: name -> the tensor of the checkpoint whose values it has; None for none.

    Returns:
        The fingerprint of `folder`, and the tensors of the copy by name, for writing in place.

    Raises:
        UserError: the folder has no safetensors; a file is damaged; or a symbolic link leads out of the folder.
    """
    for file in small_files(folder):
        copy_small_file(file, folder, out)
    tensors = open_checkpoint(folder)
    if any(isinstance(tensor, Quantized) for tensor in tensors.values()):
        fingerprint = take_fingerprint(folder, on_read=on_read)
        tensors |= added or {}
        output = create_files(tensors, out, lambda name, tensor: {name: (tensor.torch_dtype, tensor.shape)})
        copy_rows(tensors, output)
        write_config(folder, out, None)
    else:
        if not (folder / SINGLE_FILE).is_file() and (folder / INDEX_FILE).is_file():
            copy_small_file(folder / INDEX_FILE, folder, out)
        fingerprint = take_fingerprint(folder, copy_to=out, on_read=on_read)
        output = {name: tensor.within(out) for name, tensor in tensors.items()}
        if added:
            output = _with_tensors(added, output, out)
    return fingerprint, output


def _with_tensors(added: Mapping[str, Stored], output: Mapping[str, Stored], out: Path) -> dict[str, Stored]:
    """Write further tensors of a checkpoint in `out` to a file of their own, `output` being the others; return all.

    `model.safetensors` is renamed, since programs that find it read no other file.
    """
    if (out / SINGLE_FILE).is_file():
        first, own = out / "model-00001-of-00002.safetensors", out / "model-00002-of-00002.safetensors"
        (out / SINGLE_FILE).rename(first)
        output = {name: replace(tensor, file=first) for name, tensor in output.items()}
    else:
        own = out / "model-untied.safetensors"
    written = create_file(own, {name: (tensor.torch_dtype, tensor.shape) for name, tensor in added.items()})
    copy_rows(added, written)
    output = {**output, **written}
    _write_index(output, out)
    return output


def copy_rows(tensors: Mapping[str, Stored], output: Mapping[str, Stored]) -> None:
    """Write the values of tensors, dequantized, to the places of the same names, block by block."""
    for name, tensor in tensors.items():
        for start, stop in tensor.blocks():
            output[name].write(tensor.rows(start, stop), start)


def create_files(
    tensors: Mapping[str, Stored], out: Path, parts: Callable[[str, Stored], Mapping[str, Any]]
) -> dict[str, Stored]:
    """Create files of zeros in `out`, named as the files that hold `tensors`, and their index.

    `parts` takes the name of a tensor and the tensor, and returns those that stand for it in the new files: name ->
    (dtype, shape). Return all of them by name, for writing in place.
    """
    written: dict[str, Stored] = {}
    for file in sorted({tensor.file.name for tensor in tensors.values()}):
        here = [parts(name, tensor) for name, tensor in tensors.items() if tensor.file.name == file]
        written |= create_file(out / file, {name: kind for layout in here for name, kind in layout.items()})
    if not (out / SINGLE_FILE).is_file():
        _write_index(written, out)
    return written


def _write_index(tensors: Mapping[str, Stored], out: Path) -> None:
    size = sum(tensor.nbytes for tensor in tensors.values())
    files = {name: tensor.file.name for name, tensor in sorted(tensors.items())}
    _write_json(out / INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": files})


def write_config(folder: Path, out: Path, quantization: Mapping[str, Any] | None) -> None:
    """Write the `config.json` of the checkpoint in `folder` to `out`, with `quantization` as its `quantization_config`;
    None for none. Remove programs' files of the same settings from `out`, where they were copied."""
    config = read_json(folder / "config.json", dict[str, Any])
    remove_settings(config)
    _write_json(out / "config.json", config if quantization is None else config | {"quantization_config": quantization})
    for name in SETTINGS_BESIDE:
        (out / name).unlink(missing_ok=True)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
