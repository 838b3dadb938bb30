"""`resolve`: a run file's model on the meta device, all settings checked, a `ResolvedRun`."""

import copy
from dataclasses import replace
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from moetune.compat.transformers import set_attention
from moetune.config.load import load_run_config
from moetune.config.resolved import ResolvedConfig, ResolvedModelConfig, ResolvedTrain, resolved
from moetune.config.schema import ModelConfig, RunConfig
from moetune.errors import UserError, raise_problems
from moetune.files import expanded
from moetune.formats.source_quantization import remove_settings
from moetune.models.dry_run import dry_run
from moetune.models.routers import ScoreFunction, correction_bias, score_functions
from moetune.models.selection import NOTHING, select
from moetune.models.source import ModelSource, find_model_source
from moetune.models.structure import meta_model, read_structure
from moetune.models.tied import untied
from moetune.run import validation
from moetune.run.choice import resolve_choices
from moetune.run.dtypes import DTYPES, DeviceType, dtype_on, this_device
from moetune.run.folder_files import read_expert_load
from moetune.run.keeps import kept_by_layer
from moetune.run.linears import read_directly
from moetune.run.merge_into import merge_problems
from moetune.run.names import parts_by_name
from moetune.run.placement import balance_experts
from moetune.run.resolved import ResolvedModel, ResolvedRun

AnyRun = ResolvedRun | RunConfig | Path | str
"""A run in any accepted form: a resolved run, a `RunConfig`, or the path of a run file."""


def resolve(run: AnyRun, device_type: DeviceType | None = None, *, like: ResolvedRun | None = None) -> ResolvedRun:
    """Resolve a run file on its model, without reading weights or data.

    The network is used only for a model that is neither in the catalog nor in a local folder.

    Args:
        run: a `ResolvedRun` that has no problems is returned unchanged.
        device_type: the kind of device that the run is for, which decides `model.dtype: auto`; by default that of this
            machine.
        like: a resolved run, whose model is reused if `model.path` and dtype are equal.

    Raises:
        UserError: the file or the model cannot be found or read; or settings contradict the model or each other, one
            line for each.
    """
    run = examine(run, device_type, like=like)
    raise_problems(run.problems)
    return run


def examine(run: AnyRun, device_type: DeviceType | None = None, *, like: ResolvedRun | None = None) -> ResolvedRun:
    """Resolve a run file as `resolve` does, but put a line for each contradiction into `ResolvedRun.problems`.

    Args:
        run: a `ResolvedRun` is returned unchanged.
        device_type: decides `model.dtype: auto`; by default the kind of device of this machine.
        like: a resolved run, whose model is reused if `model.path` and dtype are equal.

    Raises:
        UserError: the file or the model cannot be found or read.
    """
    if isinstance(run, ResolvedRun):
        return run
    config = run if isinstance(run, RunConfig) else load_run_config(run)
    device_type = device_type or this_device()
    model, problems = _resolve_model(config.model, device_type, None if like is None else like.model)
    plain, structure = model.plain, model.structure
    adapt, scored, wrong = resolve_choices(config.adapt, structure)
    selection = NOTHING
    if not wrong:
        inert = [path for path in structure.lora_layers() if read_directly(plain, path)]
        selection, wrong = select(adapt, structure, inert)
    problems += wrong
    coefficient = config.train.router_aux_loss
    if coefficient == "auto":
        coefficient = getattr(model.settings.get_text_config(), "router_aux_loss_coef", None) or 0.0
        if not coefficient:
            missing = f"the configuration of {structure.model_type!r} has no router_aux_loss_coef"
            problems.append(f"train.router_aux_loss: auto, and {missing}; set a number such as 0.001")
    train = resolved(ResolvedTrain, config.train, router_aux_loss=coefficient)
    config = resolved(ResolvedConfig, config, model=model.config, adapt=adapt, train=train)
    parts = parts_by_name(structure, selection)
    optimizers = {part: settings for part, settings in config.optimizers.items() if part in parts.values()}
    keeps = kept_by_layer(train, structure)
    result = ResolvedRun(config, device_type, model, selection, parts, optimizers, keeps=keeps, scored=tuple(scored))
    if not wrong:
        problems += [*validation.unmatched_optimizers(result), *validation.idle_routers(result)]
    problems += validation.problems_of(result)
    if result.rounding is not None and not wrong:
        problems += merge_problems(result)
    parallel = config.parallel
    if parallel.ep > 1 and not [*validation.indivisible_sizes(result)]:
        try:
            load = None if parallel.load is None else read_expert_load(expanded(parallel.load), "parallel.load")
            result = replace(result, placement=balance_experts(structure, selection, parallel.ep, load))
        except UserError as error:
            problems.append(str(error))
    if train.dense_router_gradient:
        scores: dict[int, ScoreFunction] = score_functions(plain, structure.moe_layers)
        result = replace(result, router_scores=scores)
        problems += validation.dense_gradient_problems(result)
    if train.router_bias_rate:
        routers = {router.layer for router in structure.parameters_of("router") if router.name in selection.full}
        names = {x.index: correction_bias(plain, x) for x in structure.moe_layers if x.index in routers}
        biases = {layer: name for layer, name in names.items() if name is not None}
        result = replace(result, router_biases=biases)
        problems += validation.missing_router_biases(result, len(routers))
    return replace(result, problems=tuple(dict.fromkeys(problems)))


def resolve_model(config: ModelConfig, device_type: DeviceType = "cuda") -> ResolvedModel:
    """Resolve a `model:` section without a run; `device_type` decides `dtype: auto`.

    Raises:
        UserError: the model cannot be found or read, or does not support the section's settings.
    """
    model, problems = _resolve_model(config, device_type, None)
    raise_problems(problems)
    return model


def untied_model(model: ResolvedModel) -> ResolvedModel:
    """Return a model with each weight of its own that its configuration ties to another."""
    source = replace(model.source, config=untied(model.source.config))
    settings, plain = _plain_of(source, model.config.dtype)
    return replace(model, source=source, settings=settings, plain=plain, structure=read_structure(plain))


def _resolve_model(
    written: ModelConfig, device_type: DeviceType, like: ResolvedModel | None
) -> tuple[ResolvedModel, list[str]]:
    """Return the resolved model, reusing that of `like` if path and dtype are equal; and a line for each problem."""
    dtype = dtype_on(device_type) if written.dtype == "auto" else written.dtype
    if like is None or (written.path, dtype) != (like.config.path, like.config.dtype):
        like = None
    source = find_model_source(written.path) if like is None else like.source
    settings, plain = _plain_of(source, dtype) if like is None else (like.settings, like.plain)
    attention = written.attention
    if attention == "auto":
        attention = "eager" if any(validation.unsupported_attention(plain, "sdpa")) else "sdpa"
    config = resolved(ResolvedModelConfig, source.quantization.settle(written), dtype=dtype, attention=attention)
    structure = read_structure(plain) if like is None else like.structure
    is_looped = dry_run(plain) if like is None else like.is_looped
    model = ResolvedModel(config, source, settings, plain, structure, is_looped)
    if paths := model.published_paths:
        experts = {layer.index: paths[layer.experts] for layer in structure.moe_layers}
        model = replace(model, config=source.quantization.experts_as_published(config, experts))
    return model, [
        *validation.unreadable_source(source.quantization, written),
        *validation.unsupported_attention(plain, attention),
        *validation.mismatched_dtypes(model.config),
        *validation.unmatched_base(model.config, structure),
    ]


def _plain_of(source: ModelSource, dtype: str) -> tuple[PretrainedConfig, PreTrainedModel]:
    """Return transformers' configuration, and the model on the meta device; `adapt/build.py` sets its attention.

    `dtype` is a key of `DTYPES`.
    """
    settings = copy.deepcopy(source.config)
    remove_settings(settings)
    set_attention(settings, "eager")
    settings.use_cache = False
    settings.dtype = DTYPES[dtype]
    return settings, meta_model(settings)
