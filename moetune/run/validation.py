"""Checks of settings against the model, ranks and each other, without weights or data.

Each function yields one line for each problem; `resolve` raises all of them together in one `UserError`.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from math import gcd
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from moetune.compat.transformers import has_sinks, supports_attention
from moetune.config.fields import ranges
from moetune.config.resolved import ResolvedModelConfig
from moetune.config.schema import BASE_PARTS, BaseConfig, KeptConfig, ModelConfig, OptimizerConfig, RunConfig
from moetune.errors import UserError, counted, raise_problems
from moetune.formats.source_quantization import SourceQuantization
from moetune.formats.table import FORMATS
from moetune.models.dry_run import flow_of
from moetune.models.routers import is_idle
from moetune.models.stack import decoder_stack, every_layer
from moetune.models.structure import ModelStructure
from moetune.run.deepspeed_json import deepspeed_json
from moetune.run.dtypes import DeviceType
from moetune.run.keeps import recomputes_layers, unknown_layers
from moetune.run.linears import LEFT_ALONE, SPLIT, read_directly, style_of, tables, tensor_plan
from moetune.run.resolved import ResolvedRun
from moetune.run.stages import stages_a_rank


def problems_of(run: ResolvedRun) -> Iterator[str]:
    """Yield every problem of a run's model, optimizers and ranks."""
    yield from unsupported_experts(run.model.plain, run.structure)
    yield from _model_problems(run)
    yield from _float16_problems(run)
    yield from unsharable_optimizers(run.config)
    yield from indivisible_sizes(run)
    yield from pipeline_problems(run)
    if run.layer_by_layer:
        yield from layer_by_layer_problems(run)
    yield from _unsplittable_attention(run)
    if run.config.parallel.engine == "deepspeed":
        try:
            deepspeed_json(run.config)
        except UserError as error:
            yield str(error)


# --- The model ----------------------------------------------------------------------------------------------------


def unreadable_source(published: SourceQuantization, model: ModelConfig) -> Iterator[str]:
    """Yield a line if the published checkpoint is quantized in a format that cannot be read; and one if `base: auto`
    would keep its 4-bit format, but `double_quant` in the `model:` section differs from the checkpoint's."""
    if not published.is_read and model.weights == "pretrained":
        yield (
            f"model.path: {model.path!r} is already quantized ({published.method}) in a way that is not read"
            f"{published.told and ': '}{published.told}; of such checkpoints MXFP4, NVFP4, FP8, MXFP8, 4 bits of "
            "bitsandbytes, and INT4 of compressed-tensors, GPTQ, AWQ and AutoRound with 32, 64, 128 or all weights of "
            "a row to a scale are; give one of these, or a bf16 checkpoint of this model"
        )
    kept = model.default_base == "auto" and "double_quant" in model.model_fields_set
    if kept and published.method == "bitsandbytes" and model.double_quant != published.double_quant:
        yield (
            f"model.double_quant: {str(model.double_quant).lower()}, but {model.path!r} is published with "
            f"{str(published.double_quant).lower()}; leave it out to keep that, or set base: nf4 to quantize it again"
        )


def unsupported_attention(plain: PreTrainedModel, attention: str) -> Iterator[str]:
    """Yield a line if a model cannot run with the attention function `attention`."""
    if supports_attention(type(plain), attention) or (attention == "sdpa" and has_sinks(plain)):
        return
    yield f"model.attention: {attention} is not available for model type {plain.config.model_type!r}; leave it out"


def mismatched_dtypes(model: ResolvedModelConfig) -> Iterator[str]:
    """Yield a line if `model.base` is fp32 and compute has fewer bits, or is bf16 and compute is fp16."""
    if "fp32" in model.storages and model.dtype != "fp32":
        yield f"model.base: fp32 needs model.dtype: fp32, not {model.dtype}; set that, or model.base: bf16"
    if "bf16" in model.storages and model.dtype == "fp16":
        yield "model.base: bf16 does not go with model.dtype: fp16; set base: nf4 or int8, or dtype: bf16"


def unmatched_base(model: ResolvedModelConfig, structure: ModelStructure) -> Iterator[str]:
    """Yield a line for each layer and part in `model.base` that the model does not have, and for each part that is to
    be stored in a format of experts alone."""
    if not isinstance(base := model.base, BaseConfig):
        return
    parts: dict[int, list[str]] = {layer: [] for layer in range(structure.num_layers)}  # of each layer
    for parameter in structure.parameters:
        layer, component = parameter.layer, parameter.component
        if layer is not None and component in BASE_PARTS and component not in parts[layer]:
            parts[layer].append(component)
    named = [("parts", [*chain(*parts.values())], base.parts)]
    if unknown := base.layers.keys() - parts.keys():
        yield f"model.base.layers: {ranges(unknown)}, and the model has the layers 0-{structure.num_layers - 1}"
    inside = {layer: of for layer, of in base.layers.items() if layer in parts and isinstance(of, dict)}
    named += [(f"layers.{layer}", parts[layer], of) for layer, of in inside.items()]
    for where, there, of_parts in named:
        for part, storage in of_parts.items():
            if part not in there:
                yield f"model.base.{where}: there are no {part}; there are {', '.join(dict.fromkeys(there))}"
            elif part != "experts" and not (FORMATS[storage].quantizes_linears or FORMATS[storage].dtype):
                yield f"model.base.{where}.{part}: {storage} is a format of experts alone; set another for {part}"


def unsupported_experts(plain: PreTrainedModel, structure: ModelStructure) -> Iterator[str]:
    """Yield a line for the first layer whose experts cannot be replaced by an `ExpertBank`."""
    for layer in structure.moe_layers:
        experts = plain.get_submodule(layer.experts)
        if getattr(experts, "has_post_expert_norm", False):
            yield f"{layer.experts}: experts with a norm after them can be counted but not trained yet"
            return
        inside = [name for name, _ in experts.named_parameters() if "." in name]
        if inside:
            yield f"{layer.experts}: its activation has weights ({inside[0]}); it can be counted, not trained"
            return


def _model_problems(run: ResolvedRun) -> Iterator[str]:
    """Yield a line for each setting of LoRA, router losses and activation checkpointing that the model does not
    support."""
    selection, train, plain = run.selection, run.config.train, run.model.plain
    model_type, layers = run.structure.model_type, len(run.structure.moe_layers)
    if run.model.is_looped and layers:
        yield f"layers of {model_type!r} run several times in a forward pass: its experts can be counted, not trained"
    inert = [path for path in selection.lora_linears if read_directly(plain, path)]
    if inert:
        yield (
            f"adapt.lora: the model reads the weight of {', '.join(inert)} without calling the layer, so LoRA there "
            "would have no effect; name the other layers in adapt.lora.targets"
        )
    routers = [path for path in selection.lora_linears if path not in run.structure.linears()]
    if selection.lora is not None and selection.lora.dropout and (selection.lora_experts or routers):
        what = "experts" if selection.lora_experts else f"the weight of {routers[0]}"
        yield (
            f"adapt.lora.dropout: PEFT has none for the factors of {what}; set it to 0, or leave "
            f"{'experts' if selection.lora_experts else 'routers'} out of adapt.lora.targets"
        )
    if routers and run.config.parallel.engine == "deepspeed" and run.config.parallel.zero == 3:
        yield (
            f"adapt.lora: {routers[0]} adds LoRA to its weight before DeepSpeed's ZeRO-3 gathers it; set "
            "parallel.engine: fsdp2 or parallel.zero: 2, or leave routers out of adapt.lora.targets"
        )
    if selection.lora is not None and selection.lora.share == "outer":
        if not selection.lora_experts:
            yield "adapt.lora.share: outer is about factors of experts, and none gets any; leave it out"
        if (ep := run.config.parallel.ep) > 1:
            yield f"adapt.lora.share: outer: parallel.ep: {ep} divides the experts that share factors; set ep: 1"
    shards = run.config.parallel.fsdp if run.config.parallel.engine == "fsdp2" else 1
    if shards > 1 and plain.get_decoder() not in (plain, decoder_stack(plain)):
        yield (
            f"parallel.fsdp: {shards} would shard layers of {model_type!r}, whose tokens are embedded outside of them; "
            "set replicate or pp in its place, or engine: deepspeed"
        )
    if (train.router_aux_loss or train.router_z_loss) and not layers:
        yield f"train.router_aux_loss / router_z_loss: {model_type!r} is a dense model without routers; set both to 0"
    if isinstance(train.keep_rows, int) and train.keep_rows > layers:
        yield f"train.keep_rows: {train.keep_rows}, and {counted(layers, 'layer')} with experts; set {layers or 'none'}"
    yield from unknown_layers(train, run.structure)
    kept = train.checkpointing
    if isinstance(kept, KeptConfig) and kept.attention != "none" and run.config.model.attention == "eager":
        yield "train.checkpointing.attention: eager attention has no kernel whose output could be kept; leave it out"
    if run.config.model.embeddings_on == "host" and not run.tables_on_host:
        why = "; ".join(f"{path}: {reason}" for path, reason in tables(plain, selection).items())
        yield f"model.embeddings_on: host: no table can leave the GPU ({why}); leave it out"
    if recomputes_layers(train) and not plain.supports_gradient_checkpointing:
        yield f"train.checkpointing: {type(plain).__name__} does not support it; set train.checkpointing: none"


def dense_gradient_problems(run: ResolvedRun) -> Iterator[str]:
    """Yield the reasons why `train.dense_router_gradient` is not possible for this run; call it only if that is set."""
    option, ep = "train.dense_router_gradient", run.config.parallel.ep
    layers = run.structure.lora_layers()
    if "router" not in run.trains and all(layers[path].component != "router" for path in run.selection.lora_linears):
        yield f"{option}: no router trains, and it is the routers' gradient; set adapt.router, or leave it out"
    if ep > 1:
        yield f"{option}: it takes all experts, and with parallel.ep: {ep} a rank holds some of them; set ep: 1"
    unknown = [layer for layer in run.structure.moe_layers if layer.index not in run.router_scores]
    if unknown:
        yield f"{option}: the weights of {unknown[0].router} are neither a softmax nor a sigmoid; leave it out"


def idle_routers(run: ResolvedRun) -> Iterator[str]:
    """Yield a line if routers train that no gradient reaches: what moves them is rounding, at full learning rate."""
    train, layers = run.config.train, run.structure.lora_layers()
    trains = "router" in run.trains or any(layers[path].component == "router" for path in run.selection.lora_linears)
    if not trains or train.dense_router_gradient or train.router_aux_loss or train.router_z_loss:
        return
    for layer in run.structure.moe_layers[:1]:
        if is_idle(run.model.plain, layer):
            yield (
                f"{layer.router} would train without a gradient: a token has one expert (num_experts_per_tok), whose "
                "weight is always the same; leave routers out of adapt, or set train.router_aux_loss"
            )


def missing_router_biases(run: ResolvedRun, routers: int) -> Iterator[str]:
    """Yield a line if no router trains, or one that does has no correction bias for `train.router_bias_rate` to update.

    `routers` is the number of routers that train.
    """
    option = "train.router_bias_rate"
    if not routers:
        yield f"{option}: a bias is updated with its router, and no router trains; set adapt.router, or leave it out"
    elif len(run.router_biases) < routers:
        yield f"{option}: the routers of {run.structure.model_type!r} have no correction bias (a buffer); leave it out"


# --- Optimizers ---------------------------------------------------------------------------------------------------


def unmatched_optimizers(run: ResolvedRun) -> Iterator[str]:
    """Yield a line for each part that trains and has no optimizer, and for each optimizer whose part does not train."""
    if isinstance(run.config.optimizer, OptimizerConfig):
        return
    for part in sorted(run.trains - run.config.optimizers.keys()):
        yield f"optimizer.{part} is missing, and that part trains"
    for part in run.config.optimizers:
        if part not in run.trains:
            yield f"optimizer.{part}: adapt: chooses nothing of that part; leave it out"


def _float16_problems(run: ResolvedRun) -> Iterator[str]:
    """Yield a line for each optimizer that would divide float16 gradients by the loss scale in float16, where small
    gradients underflow to zero."""
    plain = run.model.plain
    if plain.dtype != torch.float16:
        return
    in_float32 = {name for name, parameter in plain.named_parameters() if parameter.dtype != torch.float16}
    reported = set()
    for name, part in run.parts.items():
        optimizer = run.optimizers.get(part)
        if optimizer is None or optimizer in reported or part == "lora" or optimizer.offload:
            continue
        is_safe = optimizer.master_weights != "none" or optimizer.name in ("lomo", "adalomo", "adafactor")
        if not is_safe and name.replace(".base_layer.", ".") not in in_float32:
            reported.add(optimizer)
            yield f"model.dtype: fp16 and {optimizer.name} on {name}: set master_weights: fp32, or model.dtype: bf16"


def unsharable_optimizers(config: RunConfig) -> Iterator[str]:
    """Yield a line for each optimizer whose settings do not work over several ranks with FSDP2.

    These need whole matrices where ranks hold shards, use gradients before they have been summed over ranks, or let the
    ranks' copies of a weight diverge.
    """
    if config.parallel.ranks == 1 or config.parallel.engine == "deepspeed":
        return
    splits = config.parallel.fsdp * config.parallel.tp > 1
    for optimizer in dict.fromkeys(config.optimizers.values()):
        reasons = {
            "fused_backward frees gradients before they are summed"
            + (
                ", and updates weights while other micro-batches of the pipeline need them"
                if config.parallel.pp > 1
                else ""
            ): optimizer.fused_backward,
            "offload moves gradients to the host before they are summed": optimizer.offload,
            "master_weights: stochastic rounds the ranks' copies differently": optimizer.master_weights == "stochastic",
            "it needs whole matrices": splits and optimizer.name in ("adafactor", "adalomo"),
        }
        if any(reasons.values()):
            why = "; ".join(reason for reason, holds in reasons.items() if holds)
            remedy = "use adamw, adamw8bit, sgd or lion8bit with master_weights: none or fp32"
            if config.adapt.lora is not None and config.adapt.lora.dtype == "bf16":
                remedy += ", and for none adapt.lora.dtype: fp32"
            yield f"optimizer: over several ranks {optimizer.name} does not work: {why}; {remedy}"


# --- Ranks --------------------------------------------------------------------------------------------------------


def indivisible_sizes(run: ResolvedRun) -> Iterator[str]:
    """Yield a line for each size under `parallel:` that does not fit the model: tp must divide its key/value heads, ep
    its experts, and be a multiple of tp."""
    ep, tp = run.config.parallel.ep, run.config.parallel.tp
    kv_heads = _kv_heads(run)
    counts = sorted({layer.shape.num_experts for layer in run.structure.moe_layers})
    if any(heads % tp for heads in kv_heads):
        named, most = " and ".join(map(str, kv_heads)), gcd(*kv_heads)
        yield f"parallel.tp: {tp} ranks cannot split {named} key/value heads evenly; set tp to {_divisors(most)}"
    if ep > 1 and not counts:
        yield f"parallel.ep: {ep} ranks to divide experts over, and the model has no experts; leave ep out"
    elif ep > 1 and any(count % ep for count in counts):
        named = " and ".join(str(count) for count in counts)
        yield f"parallel.ep: {ep} ranks cannot hold {named} experts evenly; set ep to {_divisors(gcd(*counts))}"
    if ep > 1 and ep % tp:
        yield f"parallel.ep: {ep} is no multiple of tp {tp}; set ep to a multiple of tp, or to 1"


def pipeline_problems(run: ResolvedRun) -> Iterator[str]:
    """Yield a line for each reason why the model's layers cannot be divided over the stages of a pipeline."""
    parallel, train, layers = run.config.parallel, run.config.train, run.structure.num_layers
    pp, stages = parallel.pp, parallel.stages
    if (gpus := run.config.hardware.gpus) and len(gpus) != pp:
        yield (
            f"hardware.gpus: {counted(len(gpus), 'card')}, and parallel.pp: {pp}; cards of unlike size go with the "
            "stages of a pipeline, one for each: set pp to as many, or gpu: the smallest of the cards"
        )
    if pp == 1:
        if stages != "auto" and len(stages) > 1:
            yield f"parallel.stages: {len(stages)} stages, and pp: 1; set pp, the number of ranks, or leave stages out"
        if parallel.schedule != "1f1b":
            yield f"parallel.schedule: {parallel.schedule}, and pp: 1; set pp, the number of ranks, or leave it out"
        return
    beside = [f"{axis}: {size}" for axis in ("fsdp", "ep", "tp") if (size := getattr(parallel, axis)) > 1]
    beside += ["engine: deepspeed"] * (parallel.engine == "deepspeed")
    if beside:
        yield f"parallel.pp: {pp} goes with replicate, not with {' and '.join(beside)}; leave one of them out"
    if stages == "auto" and (number := pp * stages_a_rank(parallel)) > layers:
        yield f"parallel.pp: {number} stages, and the model has {counted(layers, 'layer')}; set a lower pp"
    if stages != "auto":
        yield from _wrong_stages(stages, run)
    count = train.accumulate
    if parallel.schedule == "1f1b" and count < pp:
        yield (
            f"train.accumulate: {count}, and a pipeline of {pp} stages takes {pp} micro-batches or more at once; set "
            f"accumulate: {pp} or more, or parallel.schedule: gpipe"
        )
    if parallel.schedule == "interleaved1f1b" and count % (rounds := max(1, count // pp)):
        yield f"train.accumulate: {count} micro-batches do not divide into {rounds} rounds; set a multiple of pp: {pp}"
    if run.config.model.experts_on == "host":
        yield "model.experts_on: host fetches a layer ahead, and stages change direction; set gpu, or parallel.pp: 1"
    if any("host" in kept for kept in run.keeps.values()):
        yield "train.checkpointing: inputs on the host come back in one order, and stages have several; set full"
    if run.structure.num_layers != len(every_layer(run.model.plain)):
        yield f"parallel.pp: the layers of {run.structure.model_type!r} hold layers themselves; set parallel.pp: 1"
    else:
        yield from _not_one_after_the_other(run)


def layer_by_layer_problems(run: ResolvedRun) -> Iterator[str]:
    """Yield a line for each reason why the micro-batches of a step must run one after the other."""
    config, option, lora = run.config, "train.layer_by_layer", run.config.adapt.lora
    if config.parallel.ranks > 1:
        yield f"{option}: over several ranks micro-batches run one after the other; set it to false"
    if run.model.is_looped:
        yield f"{option}: layers of this model run several times in a forward pass; set it to false"
    drawn = dict(_random_settings(run.model.settings.get_text_config().to_dict()))
    drawn |= {"train.neftune_alpha": config.train.neftune_alpha, "adapt.lora.dropout": lora.dropout if lora else 0.0}
    if named := ", ".join(f"{key}: {value:g}" for key, value in drawn.items() if value):
        yield f"{option}: random numbers ({named}) would be drawn in another order; set that to 0, or {option} to false"


def _random_settings(settings: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (key, value) of each rate of dropout or noise in a model's configuration and its parts."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _random_settings(value)
        elif isinstance(value, float) and ("drop" in key or "jitter" in key):
            yield key, value


def _wrong_stages(stages: Sequence[tuple[int, int]], run: ResolvedRun) -> Iterator[str]:
    """Yield a line if `parallel.stages` do not hold each layer once, in order, or are not as many as the schedule
    takes."""
    parallel, layers = run.config.parallel, run.structure.num_layers
    firsts = [0, *(last + 1 for _, last in stages)]
    if firsts[-1] != layers or [first for first, _ in stages] != firsts[:-1]:
        shown_ = ", ".join(f"{first}-{last}" for first, last in stages)
        yield f"parallel.stages: [{shown_}] does not hold each of the layers 0-{layers - 1} once and in order; set auto"
    several = parallel.schedule == "interleaved1f1b"
    if len(stages) % parallel.pp or (len(stages) > parallel.pp) != several:
        wanted = f"a multiple of {parallel.pp}, two or more each" if several else f"{parallel.pp}, one for each rank"
        yield f"parallel.stages: {len(stages)} stages, and schedule: {parallel.schedule} takes {wanted}"


def _not_one_after_the_other(run: ResolvedRun) -> Iterator[str]:
    """Yield a line if a layer of the model takes more from the layers before it than their hidden states, or if
    something trains outside of the layers that runs before them and is not the embedding."""
    structure, selection = run.structure, run.selection
    reason, after = flow_of(run.model.plain)
    reason = "its layers run several times in a forward pass" if run.model.is_looped else reason
    if reason:
        yield f"parallel.pp: {structure.model_type!r} cannot be divided into stages: {reason}; set parallel.pp: 1"
        return
    embedding = run.model.plain.get_input_embeddings().weight
    outside = {part.name for part in structure.parameters if part.layer is None}
    chosen = {name for name in selection.full if name in outside}
    chosen |= {f"{path}.weight" for path in selection.lora_linears if f"{path}.weight" in outside}
    for name in sorted(chosen):
        is_embedding = run.model.plain.get_parameter(name) is embedding
        if is_embedding and name in structure.tied.values():
            yield (
                f"adapt: {name} is tied to the LM head, which is on another rank (parallel.pp), so the two would train "
                "apart; leave it out of adapt, or set parallel.pp: 1"
            )
        elif not is_embedding and name not in after:
            yield f"adapt: {name} runs before the decoder layers and would train on the wrong rank; leave it out"


def _unsplittable_attention(run: ResolvedRun) -> Iterator[str]:
    """Yield a line if `parallel.tp` > 1 and attention cannot be split.

    A linear layer is not in transformers' plan, or is quantized; or a norm inside the heads trains.
    """
    if run.config.parallel.tp == 1:
        return
    plan, structure, selection = tensor_plan(run.model.plain), run.structure, run.selection
    quantized = {path for path, storage in run.quantized_linears.items() if FORMATS[storage].quantizes_linears}
    for path in structure.linears("attention"):
        if style_of(path, plan) not in SPLIT:
            yield f"parallel.tp: transformers has no way to split {path} in training; set parallel.tp: 1"
            return
        if path in quantized:
            yield f"parallel.tp: {path} is quantized (model.base), and quantized matrices cannot be split; set tp: 1"
            return
    alone = [name for name in sorted(selection.full) if style_of(name.rpartition(".")[0], plan) in LEFT_ALONE]
    if alone:
        yield f"parallel.tp: {alone[0]} trains, and each rank would see its own heads only; set parallel.tp: 1"


# --- Training and prediction --------------------------------------------------------------------------------------


def untrainable_settings(config: RunConfig) -> Iterator[str]:
    """Yield a line for each setting with which a run can be neither trained nor predicted, whatever the model."""
    parallel = config.parallel
    if parallel.engine == "fsdp2" and parallel.offload != "none":
        yield f"parallel.offload: {parallel.offload} goes with engine: deepspeed; set that, or optimizer.offload"
    if config.train.on_oom != "error" and parallel.ranks > 1:
        yield "train.on_oom: halve_micro_batch is for one GPU; set train.on_oom: error and a lower train.micro_batch"
    if config.train.on_oom != "error" and any(optimizer.fused_backward for optimizer in config.optimizers.values()):
        yield "train.on_oom: halve_micro_batch, but optimizer.fused_backward has updated weights already; set error"


def unpredictable_settings(config: RunConfig) -> Iterator[str]:
    """Yield a line for each setting with which a run cannot be predicted: those of `untrainable_settings`, and
    ZeRO-Offload.

    A prediction runs on a CPU, where host memory and device memory cannot be told apart.
    """
    yield from untrainable_settings(config)
    if config.parallel.engine == "deepspeed" and config.parallel.offload != "none":
        yield "parallel.offload: optimizer can be trained, not predicted or verified; set none to predict the rest"


def refuse_unpredictable(config: RunConfig) -> None:
    """Raise one `UserError` with all lines of `unpredictable_settings`, if there are any."""
    raise_problems(unpredictable_settings(config))


def divided_start(config: RunConfig) -> Iterator[str]:
    """Yield a line if `adapt.start_from` is set and FSDP2 divides the model over ranks before it would be loaded.

    DeepSpeed divides the model afterwards. A resumed run does not load it, so this is no problem of the run file.
    """
    parallel = config.parallel
    divide = [
        f"parallel.{axis}: {size}" for axis in ("fsdp", "ep", "tp", "pp") if (size := getattr(parallel, axis)) > 1
    ]
    if config.adapt.start_from is not None and parallel.engine == "fsdp2" and divide:
        yield (
            f"adapt.start_from: it cannot be loaded into a model that {' and '.join(divide)} divide over ranks; set "
            "that to 1, or write a base with it (moetune adapter merge; for a delta, moetune apply) and train on it"
        )


def missing_packages(config: RunConfig, device_type: DeviceType) -> Iterator[str]:
    """Yield a line if the run's attention needs the package flash-attn or a GPU, and this machine lacks it."""
    if config.model.attention != "flash_attention_2":
        return
    if device_type != "cuda":
        yield "model.attention: flash_attention_2 needs a CUDA GPU; set model.attention: sdpa"
    elif not is_flash_attn_2_available():
        yield "model.attention: flash_attention_2 needs the package flash-attn, which is not installed; set sdpa"


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _kv_heads(run: ResolvedRun) -> list[int]:
    """Return the numbers of key/value heads that layers of the model have, each once; empty if it names none."""
    text: Any = run.model.settings.get_text_config()
    layers = text.per_layer_config if text.is_heterogeneous else [text]
    return sorted({heads for layer in layers if (heads := getattr(layer, "num_key_value_heads", None)) is not None})
