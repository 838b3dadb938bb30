"""What a run file asks for and cannot have, as far as that is known without weights, data or other processes.

Each function yields one line a problem; `resolve` reports those of all together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import gcd

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from moetune.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, Part, RunConfig
from moetune.errors import counted
from moetune.models.selection import Selection
from moetune.models.source_quantization import SourceQuantization
from moetune.models.structure import ModelStructure
from moetune.run.dtypes import DeviceType
from moetune.run.linears import linears_to_quantize, read_directly
from moetune.run.tensor_plan import LEFT_ALONE, SPLIT, style_of, tensor_plan

_ATTENTION_FLAGS = {"sdpa": "_supports_sdpa", "flash_attention_2": "_supports_flash_attn"}


# --- The model ----------------------------------------------------------------------------------------------------


def of_published(published: SourceQuantization, model: ModelConfig) -> Iterator[str]:
    """A checkpoint in a format that is not read, or that is to be kept as it is not."""
    if not published.is_read and model.weights == "pretrained":
        yield (
            f"model.path: {model.path!r} is already quantized ({published.method}), and of such checkpoints MXFP4, "
            "FP8 in blocks and 4 bits of bitsandbytes are read; give one of these, or a bf16 checkpoint of this model"
        )
    kept = model.base == "auto" and published.method == "bitsandbytes" and "double_quant" in model.model_fields_set
    if kept and model.double_quant != published.double_quant:
        yield (
            f"model.double_quant: {str(model.double_quant).lower()}, but {model.path!r} is published with "
            f"{str(published.double_quant).lower()}; leave it out to keep that, or set base: nf4 to pack it anew"
        )


def of_attention(config: PretrainedConfig, attention: str) -> Iterator[str]:
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    if not getattr(model_class, _ATTENTION_FLAGS.get(attention, ""), True):
        yield (
            f"model.attention: {attention} is not available for model type {config.model_type!r}; set model.attention: "
            "eager"
        )


def of_dtypes(model: ModelConfig) -> Iterator[str]:
    """The base would be stored in more bits than are ever used, or in others. `model.dtype` is resolved."""
    if model.base == "fp32" and model.dtype != "fp32":
        yield (
            f"model.base: fp32 needs model.dtype: fp32; with {model.dtype} compute, which auto is on a GPU, store the "
            "base as bf16"
        )
    if model.base == "bf16" and model.dtype == "fp16":
        yield "model.base: bf16 does not go with model.dtype: fp16; set base: nf4 or int8, or dtype: bf16"


def of_experts(plain: PreTrainedModel, structure: ModelStructure) -> Iterator[str]:
    """Experts that a bank cannot take the place of."""
    for layer in structure.moe_layers:
        experts = plain.get_submodule(layer.experts)
        if getattr(experts, "has_post_expert_norm", False):
            yield f"{layer.experts}: experts with a norm after them can be counted but not trained yet"
            return
        inside = [name for name, _ in experts.named_parameters() if "." in name]
        if inside:
            yield (
                f"{layer.experts}: its activation has weights of its own ({inside[0]}); it can be counted, not trained"
            )
            return


def inert_linears(plain: PreTrainedModel, structure: ModelStructure) -> list[str]:
    """Linear layers whose weight the model reads without calling them, so that LoRA there would have no effect."""
    return [path for path in structure.linears() if read_directly(plain, path)]


def of_lora(plain: PreTrainedModel, selection: Selection) -> Iterator[str]:
    inert = [path for path in selection.lora_linears if read_directly(plain, path)]
    if inert:
        yield (
            f"adapt.lora: the model reads the weight of {', '.join(inert)} without calling the layer, so LoRA there "
            "would have no effect; name the other layers in adapt.lora.targets"
        )
    if selection.lora is not None and selection.lora.dropout and selection.lora_experts:
        yield (
            "adapt.lora.dropout: PEFT has none for the factors of experts; set it to 0, or leave experts out of "
            "adapt.lora.targets"
        )


def of_router_losses(config: RunConfig, structure: ModelStructure) -> Iterator[str]:
    if (config.train.router_aux_loss or config.train.router_z_loss) and not structure.moe_layers:
        yield (
            f"train.router_aux_loss / router_z_loss: {structure.model_type!r} is a dense model without routers; set "
            "both to 0"
        )


def of_dense_gradient(
    config: RunConfig, structure: ModelStructure, trains: frozenset[Part], scores: Mapping[int, str]
) -> Iterator[str]:
    """Routers whose gradient cannot go through all experts.

    Args:
        scores: layer index -> what its router's weights are of its logits, where that is known.
    """
    option = "train.dense_router_gradient"
    if "router" not in trains:
        yield f"{option}: no router trains, and it is the routers' gradient; set adapt.router, or leave it out"
    if config.parallel.ep > 1:
        yield (
            f"{option}: every token goes through all experts in backward, and with parallel.ep: {config.parallel.ep} a "
            "rank holds some of them; set parallel.ep: 1"
        )
    unknown = [layer for layer in structure.moe_layers if layer.index not in scores]
    if unknown:
        yield (
            f"{option}: the weights that {unknown[0].router} ({structure.model_type}) gives are neither a softmax nor "
            "a sigmoid of its logits, so those of experts that are not chosen are not known; leave it out"
        )


def of_router_bias(model_type: str, routers: Collection[int | None], biases: Mapping[int, str]) -> Iterator[str]:
    """A bias that is to be updated, and is not there.

    Args:
        routers: layers whose router trains.
        biases: of these, by layer.
    """
    option = "train.router_bias_rate"
    if not routers:
        yield f"{option}: a bias is updated with its router, and no router trains; set adapt.router, or leave it out"
    elif len(biases) < len(routers):
        yield (
            f"{option}: the routers of {model_type!r} have no correction bias that is a buffer "
            "(e_score_correction_bias); leave it out"
        )


def of_auto_coefficient(model_type: str) -> Iterator[str]:
    """An architecture without a coefficient of its own."""
    yield (
        f"train.router_aux_loss: auto is the architecture's own coefficient, and the configuration of {model_type!r} "
        "names none (router_aux_loss_coef); set a number such as 0.001"
    )


def of_checkpointing(config: RunConfig, plain: PreTrainedModel) -> Iterator[str]:
    if config.train.checkpointing in ("full", "offload") and not plain.supports_gradient_checkpointing:
        yield (
            f"train.checkpointing: {type(plain).__name__} does not support activation checkpointing; set "
            "train.checkpointing: none"
        )


# --- Optimizers ---------------------------------------------------------------------------------------------------


def of_parts(config: RunConfig, trains: frozenset[Part]) -> Iterator[str]:
    """Every part that trains has an optimizer, and every optimizer something to train."""
    if isinstance(config.optimizer, OptimizerConfig):
        return
    for part in sorted(trains - config.optimizers.keys()):
        yield f"optimizer.{part} is missing, and that part trains"
    for part in config.optimizers:
        if part not in trains:
            yield f"optimizer.{part}: adapt: chooses nothing of that part; leave it out"


def of_float16(
    plain: PreTrainedModel, parts: Mapping[str, Part], optimizers: Mapping[Part, OptimizerConfig]
) -> Iterator[str]:
    """float16 gradients are scaled; taking the scale off in float16 would make the small ones zero again."""
    if plain.dtype != torch.float16:
        return
    kept = {name for name, parameter in plain.named_parameters() if parameter.dtype != torch.float16}
    told = set()
    for name, part in parts.items():
        optimizer = optimizers.get(part)
        if optimizer is None or optimizer in told or part == "lora" or name.replace(".base_layer.", ".") in kept:
            continue
        if (
            optimizer.master_weights == "none"
            and not optimizer.offload
            and optimizer.name not in ("lomo", "adalomo", "adafactor")
        ):
            told.add(optimizer)
            yield (
                f"model.dtype: fp16 and {optimizer.name} on {name}: set optimizer.master_weights: fp32, use lomo, "
                "adalomo or adafactor, which compute in float32, or set model.dtype: bf16"
            )


def of_unshared(config: RunConfig) -> Iterator[str]:
    """Optimizers that cannot work with a part of a weight, or without the other ranks'."""
    if config.parallel.ranks == 1 or config.parallel.engine == "deepspeed":
        return
    problems = []
    splits = config.parallel.fsdp * config.parallel.tp > 1
    for optimizer in dict.fromkeys(config.optimizers.values()):
        if optimizer.fused_backward:
            problems.append(f"{optimizer.name} with fused_backward frees gradients before the ranks have added them up")
        if optimizer.offload:
            problems.append(f"{optimizer.name} with offload takes gradients away before the ranks have added them up")
        if optimizer.master_weights == "stochastic":
            problems.append("master_weights: stochastic would round the copies of one weight apart")
        if splits and optimizer.name in ("adafactor", "adalomo"):
            problems.append(f"{optimizer.name} needs whole matrices, and parallel.fsdp and tp split them")
    if problems:
        yield (
            f"optimizer: over several ranks {'; '.join(problems)}. Use adamw, adamw8bit, sgd or lion8bit with "
            "master_weights: none or fp32"
        )


# --- Ranks --------------------------------------------------------------------------------------------------------


def of_division(
    parallel: ParallelConfig, *, layers: int, experts: Sequence[int], kv_heads: int | None = None
) -> Iterator[str]:
    """Every size of `parallel` that a model does not have the parts for.

    Args:
        layers: how many it has.
        experts: how many each layer with experts has.
        kv_heads: key/value heads of attention, which tp cannot divide further.
    """
    pp, ep, tp = parallel.pp, parallel.ep, parallel.tp
    counts = sorted(set(experts))
    if pp > layers:
        yield f"parallel.pp: {pp} stages and only {counted(layers, 'layer')}; set pp to {layers}"
    if kv_heads is not None and kv_heads % tp:
        yield f"parallel.tp: {tp} ranks cannot split {kv_heads} key/value heads evenly; set tp to {_divisors(kv_heads)}"
    if ep > 1 and not counts:
        yield f"parallel.ep: {ep} ranks to spread experts over, and the model has none; leave ep out"
    elif ep > 1 and ep > counts[0]:
        yield (
            f"parallel.ep: more ranks than experts, {ep} and {counts[0]}; set ep to {_divisors(gcd(*counts))}, "
            "and fsdp to the rest"
        )
    elif ep > 1 and any(count % ep for count in counts):
        named = " and ".join(str(count) for count in counts)
        yield f"parallel.ep: {ep} ranks cannot hold {named} experts evenly; set ep to {_divisors(gcd(*counts))}"
    if ep > 1 and ep % tp:
        yield (
            f"parallel.ep: {ep} is no multiple of tp {tp}; the ranks that split a matrix send their experts separate "
            "tokens, so set ep to a multiple of tp, or to 1"
        )


def of_split_attention(
    config: RunConfig, plain: PreTrainedModel, structure: ModelStructure, selection: Selection
) -> Iterator[str]:
    """Attention is split over `parallel.tp` by transformers' plan, and only where it is not packed."""
    if config.parallel.tp == 1:
        return
    plan = tensor_plan(plain)
    packed = set(linears_to_quantize(plain, structure, selection)) if config.model.base in ("nf4", "int8") else set()
    for path in structure.linears("attention"):
        if style_of(path, plan) not in SPLIT:
            yield (
                f"parallel.tp: transformers has no way to split {path} of model type {structure.model_type!r} in "
                "training; set parallel.tp: 1"
            )
            return
        if path in packed:
            yield (
                f"parallel.tp: {path} is packed (model.base), and packed matrices cannot be split; set parallel.tp: 1, "
                "or model.base to the precision of compute"
            )
            return
    alone = [name for name in sorted(selection.full) if style_of(name.rpartition(".")[0], plan) in LEFT_ALONE]
    if alone:
        yield f"parallel.tp: {alone[0]} trains, and each rank would see its own heads only; set parallel.tp: 1"


# --- What takes place, or is predicted ----------------------------------------------------------------------------


def of_training(config: RunConfig) -> Iterator[str]:
    """Settings that can be neither trained nor predicted."""
    parallel = config.parallel
    if parallel.pp > 1:
        yield (
            "parallel.pp: transformers' pipeline stages run forward only, so nothing can train in them; set "
            "parallel.pp: 1 and a higher parallel.fsdp"
        )
    if parallel.engine == "fsdp2" and parallel.offload != "none":
        yield (
            f"parallel.offload: {parallel.offload} goes with engine: deepspeed; set that, or leave parallel: out and "
            "set optimizer.offload"
        )
    if config.train.on_oom != "error" and parallel.ranks > 1:
        yield (
            "train.on_oom: halve_micro_batch is for one GPU: memory runs out on one rank, and the others would wait "
            "for it; set train.on_oom: error and a lower train.micro_batch"
        )
    if config.train.on_oom != "error" and any(optimizer.fused_backward for optimizer in config.optimizers.values()):
        yield (
            "train.on_oom: halve_micro_batch takes a step again, and optimizer.fused_backward has updated weights in "
            "it already; set train.on_oom: error and a lower train.micro_batch"
        )


def of_prediction(config: RunConfig) -> Iterator[str]:
    """Settings that cannot be predicted: those that cannot be trained, and ZeRO-Offload, whose host memory DeepSpeed
    does not tell from the device's where both are a CPU's."""
    yield from of_training(config)
    if config.parallel.engine == "deepspeed" and config.parallel.offload != "none":
        yield (
            f"parallel.offload: {config.parallel.offload} can be trained, not predicted or verified; to predict the "
            "rest of the run, set parallel.offload: none"
        )


def of_packages(config: RunConfig, device_type: DeviceType) -> Iterator[str]:
    """What a run that takes place on this machine needs, and is not installed."""
    if config.model.attention != "flash_attention_2":
        return
    if device_type != "cuda":
        yield "model.attention: flash_attention_2 needs a CUDA GPU; set model.attention: sdpa"
    elif not is_flash_attn_2_available():
        yield (
            "model.attention: flash_attention_2 needs the package flash-attn, which is not installed; install it, or "
            "set model.attention: sdpa, which runs torch's own flash attention"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
