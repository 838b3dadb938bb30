"""`train.loss_memory: auto`: logits may take what the backward pass of a layer's experts takes later in the step.

The peak of a step is at the backward of the last layer with experts, where all saved activations are still alive, or
later. At the loss they are alive as well, and what that backward will take is free. The formula counts the largest of
its tensors only, so that the loss never becomes the peak.
"""

from __future__ import annotations

from moetune.config.schema import TrainConfig
from moetune.models.moe import MoeLayer

LEAST = 256 << 20
"""Bytes for the logits of a chunk where a layer's backward takes less: enough for a matrix product at full speed."""


def backward_bytes(
    layer: MoeLayer,
    train: TrainConfig,
    tokens: int,
    width: int,
    at_once: int,
    *,
    experts: int,
    dequantizes: bool,
    keeps: bool,
) -> int:
    """Return a lower bound of the bytes that the experts of a layer take in backward beside what forward kept.

    Counted are, of the group of experts that is computed, with N rows in balanced routing: the gate_up matrices if they
    are dequantized; the rows of dact [N, I], gate_up [N, O] and x [N, H], or only the latter if the rows of gate_up are
    kept; and for groups of several experts, if gradients pass through every layer, all gathered rows [T·K, H].

    Args:
        layer: the last layer with experts.
        tokens: T, the tokens of a micro-batch on a rank.
        width: bytes of an element.
        at_once: bytes of dequantized matrices that a group may have (`train.expert_memory`).
        experts: the layer's experts on a rank.
        dequantizes: whether matrices are computed for the product, and are not those that are stored.
        keeps: whether the layer keeps the rows of gate_up.
    """
    shape, rows = layer.shape, tokens * layer.top_k
    columns = shape.intermediate * (2 if shape.has_gate else 1)
    matrix = shape.hidden * columns
    most = max(1, at_once // (matrix * width))
    group = experts // -(-experts // most)
    elements = group * matrix if dequantizes else 0
    elements += rows * group // experts * (shape.hidden + (0 if keeps else columns + shape.intermediate))
    if group > 1 and layer.top_k > 1 and train.checkpointing in ("full", "offload"):
        elements += rows * shape.hidden
    return width * elements
