"""`moetune quantize --measure`: what rounding each part of each layer costs."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from rich.console import Console
from torch import Tensor, nn

from moetune.config.schema import BaseConfig, QuantizedDtype
from moetune.errors import DoesNotFit
from moetune.experts.quantized import QuantizedExperts
from moetune.formats.table import FORMATS, format_of
from moetune.inference.evaluate import ROWS, evaluated, mean_loss, rows_of
from moetune.inference.memory import lengths_of, predict_eval
from moetune.inference.opened import Opened, find_in_16_bits
from moetune.json_files import Answer
from moetune.planning.at_hand import refuse_unfit, surely_below
from moetune.report.console import terminal
from moetune.report.progress import counting
from moetune.routing.data_sets import some_of
from moetune.run.dtypes import this_device
from moetune.run.resolved import ResolvedRun
from moetune.training.data.load import pad_token_id

LayerPart = tuple[int, str]
"""A decoder layer, and a part of it (`BasePart`)."""


@dataclass(frozen=True)
class PartCost:
    """What a part of one layer costs if it alone is rounded.

    Attributes:
        cost: by how much the loss rises, in nats a predicted token.
        bytes: how much more memory the part takes in 16 bits than rounded.
    """

    layer: int
    part: str
    cost: float
    bytes: int


@dataclass(frozen=True)
class Rounding(Answer):
    """What rounding does to a model: mean losses over predicted tokens, in nats.

    Attributes:
        storage: the format that it is rounded to.
        loss: of the model in 16 bits.
        rounded_loss: with all parts rounded.
        parts: each part of each layer.
        base: the value of `model.base` that leaves in 16 bits what a budget holds; None without a budget.
        base_bytes, base_loss: how much more memory that takes than `storage` alone, and its loss.
    """

    model: str
    storage: QuantizedDtype
    data: str
    records: int
    tokens: int
    loss: float
    rounded_loss: float
    parts: tuple[PartCost, ...]
    base: Any = None
    base_bytes: int | None = None
    base_loss: float | None = None


def measure(
    model: str,
    data: str,
    storage: QuantizedDtype = "nf4",
    *,
    double_quant: bool = True,
    budget: int | None = None,
    tokens: int = 32_768,
    sequence_length: int | None = None,
    format: str | None = None,
    console: Console | None = None,
) -> Rounding:
    """Round each part of each layer of a model alone, compute the loss, and restore the part, of which the host holds a
    copy meanwhile; then round all but what a budget leaves in 16 bits; then all.

    If the model in 16 bits does not fit the GPU of this machine, its experts stay on the host.

    Args:
        model: the folder of a checkpoint, a catalog name or a hub id.
        data, sequence_length, format: as in `evaluate`.
        storage, double_quant: the format, as `model.base` and `model.double_quant`.
        budget: bytes that the base may take more than with all of it rounded; None to propose nothing.
        tokens: how many to read of the data, in whole records in a random order.
        console: where progress is shown; by default stderr.

    Raises:
        UserError: the model or the data cannot be read, or the loss is not finite.
        DoesNotFit: the model in 16 bits fits this machine in neither way.
    """
    device, console = this_device(), console or terminal(stderr=True)
    opened = find_in_16_bits(model, device)
    run = opened.run
    assert run is not None
    rows = some_of(data, rows_of(opened, data, sequence_length, format)[0], run.config, tokens).rows
    try:
        _refuse_unfit(opened, rows)
    except DoesNotFit:
        if device == "cpu":
            raise
        opened = find_in_16_bits(model, device, on_host=True)
        _refuse_unfit(opened, rows)
        console.print("the model in 16 bits does not fit the card: its experts stay on the host")
    plain, padding, loaded = evaluated(opened, rows, data, data), pad_token_id(opened.tokenizer), opened.model
    matrices = _matrices(run, loaded, storage)

    def rounded_loss(layer_parts: Iterable[LayerPart]) -> float:
        for part_of_layer in layer_parts:
            for stack in matrices[part_of_layer]:
                _round_(stack, storage, double_quant, loaded.device)
        return mean_loss(loaded, rows, padding)[0]

    parts = []
    with counting(console, "rounding", len(matrices)) as advance:
        for (layer, part), stacks in matrices.items():
            before = [stack.to("cpu", copy=True) for stack in stacks]
            cost = rounded_loss([(layer, part)]) - plain.loss
            for stack, values in zip(stacks, before, strict=True):
                stack.copy_(values)
            parts.append(PartCost(layer, part, cost, sum(_saved(stack, storage, double_quant) for stack in stacks)))
            advance(1)
    left = left_in_16_bits(parts, budget or 0)
    unrounded = {(kept.layer, kept.part) for kept in left}
    base_loss = rounded_loss(matrices.keys() - unrounded)
    loss = rounded_loss(unrounded) if unrounded else base_loss
    proposed = base_of(left, parts, storage), sum(kept.bytes for kept in left), base_loss
    fields = opened.name, storage, data, plain.records, plain.tokens, plain.loss, loss, tuple(parts)
    return Rounding(*fields, *(() if budget is None else proposed))


def left_in_16_bits(parts: Iterable[PartCost], budget: int) -> list[PartCost]:
    """Return the parts to leave in 16 bits, in a budget of bytes: those that cost most nats for their bytes first.

    Costs are taken to add up, and a part that costs nothing is not among them.
    """
    left = []
    for part in sorted(parts, key=lambda part: -part.cost / part.bytes):
        if part.cost > 0 and part.bytes <= budget:
            left.append(part)
            budget -= part.bytes
    return left


def base_of(left: Sequence[PartCost], parts: Sequence[PartCost], storage: QuantizedDtype) -> Any:
    """Return the value of `model.base` with which of `parts` those in `left` are in bf16, all others in `storage`."""
    kept = {cost.layer: {same.part: "bf16" for same in left if same.layer == cost.layer} for cost in left}
    counts = Counter(cost.layer for cost in parts)
    layers = {layer: "bf16" if len(of_layer) == counts[layer] else of_layer for layer, of_layer in sorted(kept.items())}
    base = BaseConfig.model_validate({"default": storage, "layers": layers})
    return base.model_dump(mode="json", exclude_defaults=True) if left else storage


def _matrices(run: ResolvedRun, model: nn.Module, storage: QuantizedDtype) -> dict[LayerPart, list[Tensor]]:
    """Return what of a model a run with this storage would quantize: place -> its stacks of matrices [n, out, in]."""
    matrices: dict[LayerPart, list[Tensor]] = {}
    for layer in run.structure.moe_layers:
        bank: Any = model.get_submodule(layer.experts)
        matrices[layer.index, "experts"] = [bank.gate_up.data, bank.down.data]
    linears = run.structure.linears()
    for path in run.quantized_linears if FORMATS[storage].quantizes_linears else ():
        if (number := linears[path].layer) is not None:
            weight = model.get_parameter(f"{path}.weight").data
            matrices.setdefault((number, linears[path].component), []).append(weight[None])
    return dict(sorted(matrices.items()))


def _refuse_unfit(opened: Opened, rows: datasets.Dataset) -> None:
    """Raise `DoesNotFit` if this machine cannot hold a model while it is evaluated on the rows."""
    lengths = lengths_of(rows)
    rough = surely_below(opened.resolved.structure, ROWS * max(lengths, default=0))
    refuse_unfit("measuring", rough, lambda card: predict_eval(opened, lengths, gpu=card), "moetune eval --predict")


@torch.no_grad()
def _round_(stack: Tensor, storage: QuantizedDtype, double_quant: bool, device: torch.device) -> None:
    """Replace each matrix of a stack [n, out, in] by its rounded values, computed on `device`."""
    quantized = QuantizedExperts(1, (stack.shape[1], stack.shape[2]), storage, double_quant=double_quant, device=device)
    for matrix in stack:
        quantized.quantize_(0, matrix)
        matrix.copy_(quantized.matrix(0, matrix.dtype))


def _saved(stack: Tensor, storage: QuantizedDtype, double_quant: bool) -> int:
    """Return how many bytes fewer a stack [n, out, in] takes quantized than in 16 bits."""
    sizes = format_of(storage, double_quant).buffers(len(stack), (stack.shape[1], stack.shape[2]))
    return 2 * stack.numel() - sum(dtype.itemsize * math.prod(size) for dtype, size in sizes.values())
