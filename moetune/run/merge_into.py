"""`train.merge_into`: which weights `export --into` rounds, whether a run can train for it."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from moetune.errors import UserError, first_of
from moetune.formats.base import Format, Quantized
from moetune.formats.rounding import Rounding
from moetune.formats.table import FORMATS
from moetune.models.hub.key_mapping import key_mappings, published_tensors
from moetune.models.selection import NOTHING
from moetune.run.linears import linears_to_quantize
from moetune.run.names import stacks
from moetune.run.resolved import ResolvedModel, ResolvedRun

Tensors = Mapping[str, Any]
"""Name -> tensor of a checkpoint: read are names and shapes, and whether it is `Quantized`."""


def merge_problems(run: ResolvedRun) -> Iterator[str]:
    """Yield the reasons why a run cannot train with its merged weights rounded; call it only if `run.rounding` is
    set."""
    rounding, into, parallel = run.rounding, run.config.train.merge_into, run.config.parallel
    assert rounding is not None
    option, published, base = f"train.merge_into: {into}", run.model.source.quantization, run.config.model.base
    if published.method == "moetune":
        yield f"{option}: a merge is into the checkpoint that was quantized; set model.path to that checkpoint"
    elif published.method and not rounding.keep:
        yield f"{option}: {run.config.model.path!r} is published in {published.method}; give one in {into} or 16 bits"
    elif rounding.keep and base != published.base:
        yield f"{option}: the base is published so, and model.base: {base} would change it; set base: auto"
    elif not rounding.keep and (not isinstance(base, str) or FORMATS[base].dtype is None):
        why = "does not hold the weights to merge" if isinstance(base, str) else "is a section, and not one storage"
        yield f"{option}: model.base: {base} {why}; set base: bf16, or give a base in {into}"
    if run.selection.lora is not None and run.selection.lora.dropout:
        yield f"{option}: a merged weight has no dropout; set adapt.lora.dropout: 0"
    sharded = [f"{axis}: {getattr(parallel, axis)}" for axis in ("fsdp", "tp") if getattr(parallel, axis) > 1]
    if sharded or parallel.engine == "deepspeed":
        beside = " and ".join(sharded) or "engine: deepspeed"
        yield f"{option}: it needs whole weights and factors, and parallel.{beside} shards them; leave that out"
    try:
        yield from unmerged(run, rounded_names(run.model, rounding))
    except UserError as error:
        yield f"{option}: {error}"


def unmerged(run: ResolvedRun, rounded: Collection[str]) -> Iterator[str]:
    """Yield a line for weights that train, and that a merge rounds otherwise than training could; `rounded` is from
    `rounded_names`."""
    option, selection, structure = f"train.merge_into: {run.config.train.merge_into}", run.selection, run.structure
    rounding = run.rounding
    assert rounding is not None
    whole = [name for name in sorted(selection.full) if name in rounded]
    whole += [
        f"{layer.experts} (whole experts)" for layer in structure.moe_layers if selection.experts.get(layer.index)
    ]
    if whole:
        yield (
            f"{option}: only LoRA trains with rounded weights, and {', '.join(first_of(whole))} train in full; leave "
            "them out of adapt, or leave merge_into out"
        )
    linears = [path for path in selection.lora_linears if f"{path}.weight" in rounded]
    if not linears and not any(selection.lora_experts.values()):
        yield f"{option}: nothing that it rounds gets LoRA; choose attention or experts in adapt.lora, or leave it out"
    if apart := [path for path in linears if rounding.keep and path not in run.quantized_linears]:
        yield (
            f"{option}: the checkpoint has {', '.join(first_of(apart))} quantized, and in memory it is in 16 bits, "
            "without the scales that a merge keeps; leave it out of adapt.lora.targets"
        )


def rounded_names(model: ResolvedModel, rounding: Rounding, base: Tensors | None = None) -> set[str]:
    """Return the names in the plain model of the weights that a merged checkpoint has rounded.

    `base` are the tensors of the base checkpoint; None if it is not here: then it is taken to be as it is published.
    Raises `UserError` as `keys_to_round`.
    """
    if rounding.keep and base is None:
        linears = model.linears_to_quantize(NOTHING) if rounding.format.quantizes_linears else ()
        experts = {f"{x.experts}.{stack}" for x in model.structure.moe_layers for stack in stacks(x)}
        return {*(f"{path}.weight" for path in linears), *(name for name in experts if not name.endswith("bias"))}
    base = published_tensors(model.plain) if base is None else base
    if rounding.keep:
        keys = {name for name, tensor in base.items() if isinstance(tensor, Quantized)}
    else:
        keys = keys_to_round(model, base, rounding.format)
    return {name for name, match in key_mappings(model.plain, base).items() if not keys.isdisjoint(match.every_key())}


def keys_to_round(model: ResolvedModel, base: Tensors, format: Format) -> set[str]:
    """Return the names of the tensors to round, of a base that is published in another format.

    Raises `UserError` if the base stores experts in another way (one by one, or stacked) than checkpoints in the format
    do, so that no program would read the result.
    """
    mappings, structure, is_stacked = key_mappings(model.plain, base), model.structure, format.layouts[0].STACKS
    experts: set[str] = set()
    for layer in structure.moe_layers:
        for stack in stacks(layer):
            mapping = mappings[f"{layer.experts}.{stack}"]
            if stack.endswith("bias"):
                continue
            apart = mapping.has_experts_apart and mapping.only_merges
            of_gpt_oss = mapping.conversion is None and layer.shape.is_transposed and not layer.shape.is_concatenated
            if not (of_gpt_oss if is_stacked else apart):
                layout = "gpt-oss" if is_stacked else "models with a tensor for each expert"
                into = format.name.partition("-")[0]  # as the option has it
                raise UserError(
                    f"--into {into}: of model type {structure.model_type!r} no checkpoints are published so, "
                    f"only of {layout}; export without --into, or as an adapter"
                )
            experts |= {*mapping.every_key()}
    paths = linears_to_quantize(model.plain, structure, NOTHING, model.config) if format.quantizes_linears else ()
    linears = (mappings.get(f"{path}.weight") for path in paths)
    keys = experts | {linear.every_key()[0] for linear in linears if linear is not None and linear.conversion is None}
    return {key for key in keys if base[key].shape[1] % format.into_multiple == 0}
