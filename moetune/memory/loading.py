"""The peaks before the first step: `build` followed matrix by matrix, on the GPU and on the host."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moetune.adapt.build import compute_dtype
from moetune.anatomy.anatomy import Anatomy
from moetune.anatomy.moe import ExpertShape
from moetune.config import RunConfig
from moetune.experts.packed import BLOCK
from moetune.memory.report import LoadPeaks

_CHECKPOINT = 2  # bytes of a weight on disk: nobody ships these models in more


def load_peaks(anatomy: Anatomy, config: RunConfig, banks: Mapping[int, int], static: int) -> LoadPeaks:
    """What loading takes at most.

    GPU: one layer after the other its bank is made and filled. A checkpoint's matrix arrives, is packed, and goes.
    Random weights are drawn there a layer's experts at a time, with a mask of one byte a weight that checks the draw;
    the embedding and the head come last. A linear layer on its way is taken to be no larger than they are.

    Host: transformers reads the whole checkpoint, in the compute dtype, before anything is packed; its files are mapped
    meanwhile. Where the dtype differs, casts of tensors that wait for their layer may come to as much again.

    Args:
        banks: by layer, the bytes of its experts as they stay.
        static: the bytes of all that stays.
    """
    width = compute_dtype(config, torch.device("meta")).itemsize
    is_random = config.model.weights == "random"
    held = peak = 0
    for layer in anatomy.moe_layers:
        if layer.index not in banks:
            continue
        shape, bank = layer.shape, banks[layer.index]
        matrix = _larger_matrix(shape)
        packing = bank + _temporaries(shape, matrix, config.model.base, width)
        if is_random:
            drawn = shape.num_experts * shape.parameters_per_expert
            peak = max(peak, held + drawn * width + max(shape.num_experts * matrix, packing))
        else:
            peak = max(peak, held + packing + matrix * width)
        held += bank
    if is_random:
        outside = max(part.numel for part in anatomy.parts if part.layer is None)
        return LoadPeaks(host=0, gpu=max(peak, static + outside))
    weights = sum(part.numel for part in anatomy.parts)
    casts = 0 if width == _CHECKPOINT else weights * width
    return LoadPeaks(host=weights * (width + _CHECKPOINT) + casts, gpu=max(peak, static))


def _larger_matrix(shape: ExpertShape) -> int:
    """Weights of gate_up."""
    return shape.hidden * shape.intermediate * (2 if shape.has_gate else 1)


def _temporaries(shape: ExpertShape, n: int, base: str, width: int) -> int:
    """What packing a matrix of n weights takes: a copy where it lies the other way round, and the packed result before
    it goes into the bank."""
    copy = n * width if shape.is_transposed else 0
    match base:
        case "nf4":
            return copy + n // 2 + 4 * n // BLOCK
        case "int8":  # from a float16 copy
            return copy + 3 * n
    return copy
