"""A run file becomes an adapted model: `build(config, device)`, the one path for training, counting and prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, set_seed
from transformers.utils import logging as transformers_logging

from moetune.adapt import packed_base
from moetune.adapt.base import checkpoint_of, folder_of
from moetune.adapt.checkpointing import enable_checkpointing
from moetune.adapt.lora import add_lora
from moetune.adapt.materialize import realize
from moetune.adapt.pack import (
    Fill,
    has_values,
    linears_to_pack,
    pack_experts,
    pack_linear,
    refuse_misplaced,
    refuse_unpacked,
    share_shuttle,
)
from moetune.adapt.packed_base import is_packed_base
from moetune.adapt.quantizer import MoetuneConfig
from moetune.anatomy.anatomy import Anatomy, meta_model, read_anatomy
from moetune.anatomy.selection import Selection, select
from moetune.anatomy.source import ModelSource, resolve
from moetune.config import ParallelConfig, Part, RunConfig
from moetune.errors import UserError, one_line
from moetune.experts.bank import ExpertBank
from moetune.experts.packed import DTYPES
from moetune.hub.fingerprint import taking_fingerprint
from moetune.hub.tensor_files import weight_files
from moetune.parallel.distribute import distribute
from moetune.parallel.place import indivisible
from moetune.parallel.placement import Placement, place_experts, read_load
from moetune.parallel.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Adapted:
    """A model ready to train: what trains requires a gradient, all else is frozen in base precision."""

    model: PreTrainedModel
    anatomy: Anatomy
    selection: Selection
    ranks: Ranks = ALONE

    def part_of(self, name: str) -> Part:
        """Which part of the run file a trained parameter belongs to."""
        if "lora_" in name or ".lora." in name:
            return "lora"
        if any(name.startswith(f"{layer.experts}.") for layer in self.anatomy.moe_layers):
            return "experts"
        return "router" if name in {part.name for part in self.anatomy.parts_of("router")} else "other"

    def trainable(self) -> dict[str, nn.Parameter]:
        """Name -> parameter, of what trains."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def of_experts(self) -> list[nn.Parameter]:
        """What trains in expert banks."""
        banks = [self.model.get_submodule(layer.experts) for layer in self.anatomy.moe_layers]
        return [p for bank in banks for p in bank.parameters() if p.requires_grad]


def build(
    config: RunConfig,
    device: torch.device | str,
    on_read: Callable[[float], None] | None = None,
    ranks: Ranks = ALONE,
) -> Adapted:
    """Builds the adapted model on `device`, or the part of it that one of several ranks holds.

    On `meta` it has every parameter and buffer of the trained model and no storage: counting uses that. There it is not
    distributed yet (`distribute`).

    Args:
        on_read: is told, again and again, which share of a checkpoint has been read.
        ranks: the ranks of the run, as this one sees them.

    Raises:
        UserError: the run file asks for what the model does not have, its weights cannot be read, or an expert that
            should be packed is not.
    """
    device = torch.device(device)
    dtype = compute_dtype(config, device)
    source = resolve(config.model.path)
    settings = _model_config(source, config, dtype)
    model = meta_model(settings)
    anatomy = read_anatomy(model)
    selection = select(config.adapt, anatomy)
    ranks = _with_placement(ranks, config.parallel, anatomy, selection)

    set_seed(config.train.seed)
    if device.type != "meta" and config.model.weights == "pretrained" and is_packed_base(source.folder):
        folder = Path(str(source.folder))
        packed_base.read(model, anatomy, selection, config.model, folder, dtype, device, on_read, ranks)
    elif device.type != "meta" and config.model.weights == "pretrained":
        stored = config.model
        packing = MoetuneConfig(
            stored.base, stored.double_quant, stored.experts_on, selection, on_read, placement=ranks.placement
        )
        model = _load_pretrained(source, settings, packing, device)
    else:
        fill = has_values if device.type == "meta" else partial(realize, model, device=device)
        _pack(model, anatomy, selection, config, dtype, device, fill, ranks.placement)
    model.requires_grad_(False)
    model.to(device)

    trained = [parameter for name, parameter in model.named_parameters() if name in selection.full]
    assert len(trained) == len(selection.full), "a selected parameter is not in the built model"
    if selection.lora is not None and selection.lora_linears:
        add_lora(model, selection.lora_linears, selection.lora)  # PEFT freezes all but its own factors
    for parameter in trained:
        parameter.requires_grad_()
    for layer in anatomy.moe_layers:
        model.get_submodule(layer.experts).requires_grad_()
    refuse_unpacked(model, anatomy, selection, config.model)
    refuse_misplaced(model, config.model, device)
    if config.model.experts_on == "host":
        share_shuttle(model, anatomy, device)
    for layer in anatomy.moe_layers:
        bank = model.get_submodule(layer.experts)
        if isinstance(bank, ExpertBank):
            bank.keep_rows = config.train.checkpointing == "none"
    if config.train.checkpointing in ("full", "offload"):
        enable_checkpointing(model, offload_to=device if config.train.checkpointing == "offload" else None)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of what packing took
    if device.type != "meta":
        distribute(model, anatomy, selection, ranks)
    return Adapted(model, anatomy, selection, ranks)


def _with_placement(ranks: Ranks, parallel: ParallelConfig, anatomy: Anatomy, selection: Selection) -> Ranks:
    placed = {} if ranks.alone else place(parallel, anatomy, selection)
    return replace(ranks, placement=Placement(ranks.place.ep, placed)) if placed else ranks


def place(parallel: ParallelConfig, anatomy: Anatomy, selection: Selection) -> dict[int, tuple[tuple[int, ...], ...]]:
    """For each layer the experts on each of the `ep` ranks; nothing where they are not spread.

    Raises:
        UserError: `parallel.load` cannot be read, or is of another model.
    """
    if parallel.ep == 1:
        return {}
    load = None if parallel.load is None else read_load(parallel.load, "parallel.load")
    return place_experts(anatomy, selection, parallel.ep, load)


def refuse_indivisible(adapted: Adapted, parallel: ParallelConfig) -> None:
    """Raises `UserError` if the model does not have the parts that `parallel` divides it into."""
    heads = getattr(adapted.model.config.get_text_config(), "num_key_value_heads", None)
    experts = [layer.shape.num_experts for layer in adapted.anatomy.moe_layers]
    problems = indivisible(parallel, layers=adapted.anatomy.num_layers, experts=experts, kv_heads=heads)
    if problems:
        raise UserError("\n".join(problems))
    place(parallel, adapted.anatomy, adapted.selection)


def compute_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    """The dtype of compute and of what trains: `auto` is bfloat16 on a GPU and float32 on a CPU.

    Raises:
        UserError: the base would be stored in more bits than are ever used.
    """
    if config.model.dtype != "auto":
        dtype = DTYPES[config.model.dtype]
    else:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if config.model.base == "fp32" and dtype != torch.float32 and device.type != "meta":
        raise UserError("model.base: fp32 needs model.dtype: fp32; with bf16 compute, store the base as bf16")
    if config.model.base == "bf16" and dtype == torch.float16:
        raise UserError("model.base: bf16 does not go with model.dtype: fp16; set base: nf4 or int8, or dtype: bf16")
    return dtype


def count_trainable(adapted: Adapted) -> dict[str, int]:
    """Parameters that train: `total`, and by part `router`, `experts`, `lora`, `other`."""
    counts = {"total": 0, "router": 0, "experts": 0, "lora": 0, "other": 0}
    for name, parameter in adapted.trainable().items():
        counts[adapted.part_of(name)] += parameter.numel()
        counts["total"] += parameter.numel()
    return counts


def _pack(
    model: PreTrainedModel,
    anatomy: Anatomy,
    selection: Selection,
    config: RunConfig,
    dtype: torch.dtype,
    device: torch.device,
    fill: Fill,
    placement: Placement,
) -> None:
    """Packs what is to be packed and gives the rest its values, module by module."""
    for layer in anatomy.moe_layers:
        pack_experts(model, layer, selection, config.model, dtype, device, fill, placement)
    for path in linears_to_pack(model, anatomy, selection):
        pack_linear(model, path, config.model, dtype, device, fill)
    embedding = model.get_input_embeddings()
    for path, module in list(model.named_modules()):
        fill(path)
        if module is embedding:
            model.tie_weights()  # a head that is this table is not drawn for itself


def _model_config(source: ModelSource, config: RunConfig, dtype: torch.dtype) -> PretrainedConfig:
    settings = source.config
    quantization = getattr(settings, "quantization_config", None)
    if quantization is not None:
        if config.model.weights == "pretrained":
            method = quantization["quant_method"] if isinstance(quantization, dict) else quantization.quant_method
            raise UserError(
                f"model.path: {config.model.path!r} is already quantized ({method}); moetune packs the base itself: "
                "give a bf16 checkpoint of this model"
            )
        del settings.quantization_config
    model_class = AutoModelForCausalLM._model_mapping[type(settings)]
    if not getattr(model_class, _ATTENTION_FLAGS.get(config.model.attention, ""), True):
        raise UserError(
            f"model.attention: {config.model.attention} is not available for model type {settings.model_type!r}; "
            "set model.attention: eager"
        )
    settings._attn_implementation = config.model.attention
    settings.use_cache = False
    settings.dtype = dtype
    return settings


def write_packed_base(
    path: str, out: Path, base: str, double_quant: bool, on_read: Callable[[float], None] | None = None
) -> dict[str, Any]:
    """Packs a checkpoint into the folder `out`, layer by layer; layers that are there already are not read again.

    Returns:
        `files` and `bytes` that were written.

    Raises:
        UserError: no such model, its weights cannot be read, or the folder cannot be written.
    """
    model = {"path": path, "base": base, "double_quant": double_quant, "dtype": "bf16", "attention": "eager"}
    config = RunConfig.model_validate({"model": model, "adapt": {}})
    source = resolve(path)
    if folder_of(source) is None:
        raise UserError(f"model {path!r}: its weights are not on this machine; download it first, or give a folder")
    if is_packed_base(source.folder):
        raise UserError(f"model {path!r} is packed already")
    folder = checkpoint_of(path)
    source = replace(source, folder=str(folder))
    settings = _model_config(source, config, torch.bfloat16)
    weights = weight_files(folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
        packed_base.begin(out, config.model, folder, weights)
        paths = [layer.experts for layer in read_anatomy(meta_model(settings)).moe_layers]
        packing = MoetuneConfig(
            base,
            double_quant,
            on_read=on_read,
            on_bank=lambda experts, bank: packed_base.write_bank(out, experts, bank),
            done=[experts for experts in paths if (out / packed_base.layer_file(experts)).is_file()],
        )
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with taking_fingerprint(folder) as taken:
            loaded = _load_pretrained(source, settings, packing, device)
            packed_base.write_rest(out, loaded, paths)
            fingerprint = taken()
        return packed_base.finish(out, fingerprint)
    except OSError as error:
        raise UserError(f"--out {str(out)!r} cannot be written: {error.strerror or error}") from error


def _load_pretrained(
    source: ModelSource, settings: PretrainedConfig, packing: MoetuneConfig, device: torch.device
) -> PreTrainedModel:
    """Reads a checkpoint, packing what is to be packed as it comes (quantizer.py)."""
    if source.folder is None:
        raise UserError(f"model {source.name!r} has no weights to load; use model.weights=random")
    try:
        with no_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.folder,
                config=settings,
                dtype=settings.dtype,
                quantization_config=packing,
                device_map={"": device},
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = one_line(error)
        raise UserError(f"the weights of {source.name!r} cannot be loaded from {source.folder!r}: {reason}") from error
    model, info = loaded
    wrong = [f"{kind} {key}" for kind in ("missing", "unexpected") for key in sorted(info[f"{kind}_keys"])]
    wrong += [f"{key} is {[*found]}, not {[*size]}" for key, found, size in sorted(info["mismatched_keys"])]
    if wrong:
        raise UserError(f"the weights in {source.folder!r} do not fit {source.name!r}: {'; '.join(wrong[:10])}")
    model.hf_quantizer.remove_quantization_config(model)  # to Trainer it is a model like any other
    return model


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Without those of transformers; ours shows the same."""
    were_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            transformers_logging.enable_progress_bar()


_ATTENTION_FLAGS = {"sdpa": "_supports_sdpa", "flash_attention_2": "_supports_flash_attn"}
