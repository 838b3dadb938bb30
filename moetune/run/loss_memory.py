"""`train.loss_memory: auto`: bound the bytes of logits by those that the last layer's experts will take in backward.

At the loss, as in that backward, all saved activations are alive, so a loss within these bytes does not raise the peak
of the step. To be safe, only the largest tensors of the backward are counted.
"""

from moetune.models.moe import MoeLayer

LEAST = 256 << 20
"""Smallest limit in bytes: logits of this size are computed in a matrix product of full speed."""


def backward_bytes(
    layer: MoeLayer,
    tokens: int,
    width: int,
    at_once: int,
    *,
    experts: int,
    dequantizes: bool,
    keeps: bool,
    recomputed: bool,
) -> int:
    """Return a lower bound of the bytes that a layer's experts allocate in backward, without what forward saved.

    Experts are computed in groups; with balanced routing a group has N rows. The bound counts a group's dequantized
    gate_up matrices; its rows x [N, H] and, unless forward kept gate_up's rows, gate_up [N, O] and its activation [N,
    I]; and, for groups of several experts of a recomputed layer, all gathered rows [T·K, H].

    Args:
        layer: the last layer with experts.
        tokens: T, the tokens of a micro-batch on a rank.
        width: bytes of an element in compute.
        at_once: bytes of dequantized matrices that a group may have (`train.expert_memory`).
        experts: the layer's experts on a rank.
        dequantizes: whether experts are stored in another format than they are computed in.
        keeps: whether the layer keeps the rows of gate_up.
        recomputed: whether the layer is recomputed in backward.
    """
    shape, rows = layer.shape, tokens * layer.top_k
    matrix = shape.hidden * shape.gate_up_rows
    most = max(1, at_once // (matrix * width))
    group = experts // -(-experts // most)
    elements = group * matrix if dequantizes else 0
    elements += rows * group // experts * (shape.hidden + (0 if keeps else shape.gate_up_rows + shape.intermediate))
    if group > 1 and layer.top_k > 1 and recomputed:
        elements += rows * shape.hidden
    return width * elements
