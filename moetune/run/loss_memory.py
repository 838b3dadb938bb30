"""`train.loss_memory: auto`: logits take at most what the last layer's experts will.

At the loss, as in that backward, all saved activations are alive, so a loss within these bytes does not raise the peak
of the step. To be safe, only the largest tensors of the backward are counted.
"""

from moetune.config.memory_size import parse_size
from moetune.run.dtypes import DTYPES
from moetune.run.keeps import NOTHING
from moetune.run.resolved import ResolvedRun

LEAST = 256 << 20
"""Smallest limit in bytes: logits of this size are computed in a matrix product of full speed."""


def loss_bytes(run: ResolvedRun, rows: int | None = None) -> int | None:
    """Return the bytes of logits that the loss of a run may hold at once; None for no limit.

    `rows` is the number of rows of a micro-batch, on which `auto` depends; None for `train.micro_batch`.
    """
    train = run.config.train
    if train.loss_memory != "auto":
        return None if train.loss_memory == "none" else parse_size(train.loss_memory)
    if not run.structure.moe_layers or not _trains_in_layers(run):
        return LEAST
    tokens = (rows or train.micro_batch) * train.sequence_length // run.config.parallel.tp
    return max(LEAST, _backward_bytes(run, tokens))


def _backward_bytes(run: ResolvedRun, tokens: int) -> int:
    """Return a lower bound of the bytes that the last layer's experts allocate in backward, without what forward saved.

    Experts are computed in groups; with balanced routing a group has N of the T tokens. The bound counts a group's
    dequantized gate_up matrices; its rows x [N, H] and, unless forward kept gate_up's rows, gate_up [N, O] and its
    activation [N, I]; and, for groups of several experts of a recomputed layer, all gathered rows [T·K, H].
    """
    layer, width = run.structure.moe_layers[-1], run.dtype.itemsize
    shape, routed = layer.shape, tokens * layer.top_k
    trained = run.selection.experts.get(layer.index, ())
    with_lora = run.selection.lora_experts.get(layer.index, ())
    mixed = any(0 < len(ids) < shape.num_experts for ids in (trained, with_lora))
    leave_early = trained and any(settings.fused_backward or settings.offload for settings in run.optimizers.values())
    # Experts of several kinds make smaller groups; trained ones are alone where gradients leave in backward.
    at_once = 0 if mixed or leave_early else run.expert_memory
    experts, matrix = shape.num_experts // run.config.parallel.ep, shape.hidden * shape.gate_up_rows
    group = experts // -(-experts // max(1, at_once // (matrix * width)))
    stored = DTYPES.get(run.config.model.storage_of("experts", layer.index))
    is_dequantized = len(trained) < shape.num_experts and stored != run.dtype
    elements = group * matrix if is_dequantized else 0
    computed_again = 0 if layer.index in run.keeps_rows else shape.gate_up_rows + shape.intermediate
    elements += routed * group // experts * (shape.hidden + computed_again)
    if group > 1 and layer.top_k > 1 and "rest" not in run.keeps.get(layer.index, NOTHING):
        elements += routed * shape.hidden
    return width * elements


def _trains_in_layers(run: ResolvedRun) -> bool:
    """Return whether anything in a decoder layer trains, so that gradients pass through layers."""
    chosen, linears = run.selection, run.structure.lora_layers()
    return (
        bool(chosen.experts or chosen.lora_experts)
        or any(linears[path].layer is not None for path in chosen.lora_linears)
        or any(part.layer is not None and part.name in chosen.full for part in run.structure.parameters)
    )
