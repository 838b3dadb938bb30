"""`settled`: what `auto` stands for in `checkpointing`, `keep_rows`, `layer_by_layer` and `expert_memory`, by memory
left."""

from collections.abc import Iterator

import torch

from moetune.config.memory_size import parse_size
from moetune.config.schema import KeptConfig, ParallelConfig, RunConfig, TrainConfig
from moetune.experts.bank import MOST_AT_ONCE
from moetune.memory.assumed_routing import UNKNOWN, AssumedRouting
from moetune.memory.measurement.measure import catalog_name
from moetune.memory.trace import NotTraceable
from moetune.models.catalog.gpus import Gpu
from moetune.planning.fit import last_that_fits, surely_left
from moetune.planning.predictor import Predictor
from moetune.planning.savings import changed
from moetune.run.dtypes import DeviceType
from moetune.run.keeps import NOTHING, Keepable, Kept, is_open
from moetune.run.resolve import examine
from moetune.run.resolved import LEAST_EXPERT_MEMORY, ResolvedRun
from moetune.run.validation import layer_by_layer_problems


def settled(run: ResolvedRun, gpu: str | Gpu | None, routing: AssumedRouting = UNKNOWN) -> ResolvedRun:
    """Return a run with values in place of `auto` in `train.checkpointing`, `train.keep_rows`, `train.layer_by_layer`
    and `train.expert_memory`, the last of `_choices` that surely fits a GPU (None: those of `hardware:`); others
    unchanged.

    Before that the stages of a pipeline are cut (`Predictor.divided`). A run of which the first choice does not surely
    fit takes that, so its verdict never changes.

    Raises:
        UserError: the run cannot be predicted.
    """
    predictor = Predictor(gpu, routing, "high", run.device_type)
    choices = _choices(predictor.divided(run))
    if len(choices) == 1:
        return choices[0]
    last, _ = last_that_fits(
        len(choices),
        lambda number: predictor.quick(choices[number]),
        surely_left,
        start=len(choices) - 1,
    )
    return choices[max(last, 0)]


def _choices(run: ResolvedRun) -> list[ResolvedRun]:
    """Return a run with all that `auto` leaves open settled, from what takes least to what takes most.

    First experts in host memory are copied once a step, instead of once a micro-batch. Then the memory of experts that
    are computed together doubles until it holds a layer's: on an H100 1 GiB took 24 % off a micro-step of
    Qwen3-30B-A3B, and everything that layers can keep 7 % for 18 GiB (docs/benchmarks/card.md).
    Then each choice keeps in a layer more than the one before. With `checkpointing.host: auto` that is the layer's
    input, which else waits on the host; where the experts use the same link, it stays before their groups grow. With
    `checkpointing: auto` it is first attention's outputs, which take least for the time that they save; then the
    experts' rows; then the rest of a layer. The last layers come first, because they are the first in backward, so
    their bytes are freed before other layers are recomputed.
    """
    train, choices = run.config.train, [run.settled_as(None)]
    sizes = _expert_memories(run) if train.expert_memory == "auto" else []
    if sizes:
        choices = [choices[0].but(train={"expert_memory": sizes[0]})]
    on_host = run.config.model.experts_on == "host"
    if train.layer_by_layer == "auto" and on_host and train.accumulate > 1 and not any(layer_by_layer_problems(run)):
        choices.append(choices[0].but(train={"layer_by_layer": True}))
    inputs_wait = is_open(train) and isinstance(train.checkpointing, KeptConfig)
    if inputs_wait and on_host:
        choices += _inputs_stay(choices[-1])
    choices += [choices[-1].but(train={"expert_memory": size}) for size in sizes[1:]]
    if inputs_wait and not on_host:
        choices += _inputs_stay(choices[-1])
    if inputs_wait or not is_open(train):
        return choices
    last = choices[-1].config.train
    most = run.but(train={"layer_by_layer": last.layer_by_layer, "expert_memory": last.expert_memory})
    layers = list(range(run.structure.num_layers))
    of_experts = [layer.index for layer in run.structure.moe_layers]
    steps: list[tuple[Keepable, list[int]]] = [("rows", of_experts)]
    if train.checkpointing == "auto":
        steps = [("attention", layers), *steps, ("rest", layers)]
    kept = dict[int, Kept]()
    for name, where in steps:
        for layer in reversed(where):
            kept = {**kept, layer: kept.get(layer, NOTHING) | {name}}
            choices.append(most.keeping(kept))
    return choices


def _inputs_stay(run: ResolvedRun) -> Iterator[ResolvedRun]:
    keeps = dict(run.keeps)
    for layer in reversed([layer for layer, kept in keeps.items() if "host" in kept]):
        keeps[layer] = keeps[layer] - {"host"}
        yield run.keeping(keeps)


def _expert_memories(run: ResolvedRun) -> list[str]:
    """Return values of `train.expert_memory`, each twice the one before, up to what one dequantization of the largest
    layer's experts takes; empty if the least does, or on a CPU."""
    shapes = [layer.shape for layer in run.structure.moe_layers]
    weights = max((shape.num_experts * shape.hidden * shape.gate_up_rows for shape in shapes), default=0)
    most = min(weights, MOST_AT_ONCE) * run.dtype.itemsize
    size, sizes = parse_size(LEAST_EXPERT_MEMORY["cuda"]) or 0, []
    while run.device_type == "cuda" and size < most:
        sizes.append(size)
        size *= 2
    return [f"{-(-size >> 20)}MiB" for size in (*sizes, most)] if sizes else []


def with_stages(config: RunConfig, device_type: DeviceType, before: ParallelConfig | None) -> RunConfig:
    """Return a configuration with stages in place of `parallel.stages: auto`: those of `before`, with which the run was
    interrupted, if its pipeline is the same; else as predicted. A run with other problems, or of a model that cannot be
    traced, stays as it is."""
    parallel = config.parallel
    if before is not None and (before.pp, before.schedule) == (parallel.pp, parallel.schedule):
        return changed(config, {"parallel.stages": before.stages})
    run = examine(config, device_type)
    if run.problems:
        return config
    gpu = catalog_name(torch.device(device_type)) if device_type == "cuda" and not config.hardware.names else None
    try:
        run = Predictor(gpu, device_type=device_type).divided(run)
    except NotTraceable:
        return config
    return changed(config, {"parallel.stages": run.config.parallel.stages})


def settled_on(run: ResolvedRun, device: torch.device, before: TrainConfig | None = None) -> ResolvedRun:
    """Return `settled` for the GPU in `hardware.gpu`, or for `device` if that is not set.

    On a CPU the run takes what it took `before`; if the model's code cannot be traced, the least. Raises `UserError` if
    the run cannot be predicted.

    Args:
        before: the settings before the run was interrupted, which it takes again if they surely fit.
    """
    as_before = run.settled_as(before)
    if device.type == "cpu" or len(_choices(run)) == 1:
        return as_before
    gpu = None if run.config.hardware.names else catalog_name(device)
    try:
        if before is not None and surely_left(Predictor(gpu, end="high").quick(as_before)) >= 0:
            return as_before
        return settled(run, gpu)
    except NotTraceable:
        return run.settled_as(None)
