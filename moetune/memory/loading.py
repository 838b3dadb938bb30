"""The peaks before the first step: `build` followed matrix by matrix, on the GPU and on the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from moetune.config.schema import RunConfig
from moetune.experts.kernels.operators import BLOCK, INT8_AT_ONCE
from moetune.memory.report import LoadPeaks
from moetune.models.hub.names import expert_layout
from moetune.models.moe import ExpertShape, MoeLayer
from moetune.models.source_quantization import SourceQuantization
from moetune.models.structure import ModelStructure


def load_peaks(
    structure: ModelStructure,
    config: RunConfig,
    published: SourceQuantization,
    banks: Mapping[int, int],
    static: int,
    on_host: int = 0,
) -> LoadPeaks:
    """What loading takes at most.

    A checkpoint: the banks are there from the start, and tensor by tensor the rest arrives. Where it holds experts one
    by one, an expert's gate and up come, are joined, and packed: three times the matrix. Where it holds a layer's
    experts in one stack, that comes whole; if in MXFP4, expert by expert, and stays as it is. The host holds one such
    piece, or the embedding, on its way; its files are mapped, which is memory that the system takes back when it needs
    any.

    Random weights: the banks are there, and one after the other is filled. Weights are drawn a layer's experts at a
    time, with a mask of one byte a weight that checks the draw; the embedding and the head come last. A linear layer on
    its way is taken to be no larger than they are.

    Args:
        banks: by layer, the bytes of its experts as they stay on the GPU.
        static: the bytes of all that stays on the GPU.
        on_host: the bytes of what stays on the host.
    """
    width = 4 if config.model.dtype == "fp32" else 2  # auto is that of a GPU
    base = config.model.storage
    layers = [layer for layer in structure.moe_layers if layer.index in banks]
    outside = max(part.numel for part in structure.parts if part.layer is None)
    if config.model.weights == "random":
        return LoadPeaks(host=on_host, gpu=max(static + outside, _drawn(layers, base, width, banks)))
    host, on_the_way = outside * width, 0
    if layers:
        shape = layers[0].shape
        matrix = _larger_matrix(shape)
        if published.method == "mxfp4":  # as it is, unless it is packed otherwise, or trains
            host = max(host, matrix * 17 // 32)
            if base != "mxfp4" or config.adapt.experts is not None:
                # transformers looks half of the weights up at a time, by indices that torch widens to 8 bytes
                looked_up = matrix * 17 // 32 + matrix // 8 + (2 + 4 + width + width // 2) * matrix
                on_the_way = max(looked_up, matrix * width + _temporaries(shape, matrix, base, width))
            return LoadPeaks(host=host + on_host, gpu=max(static, sum(banks.values()) + on_the_way))
        layout = expert_layout(structure.model_type)
        at_once = shape.num_experts if layout == "converted" else 1
        host = max(host, matrix * width * at_once)
        joined = 1 if layout == "rows" else 2  # what a matrix is made of, and the matrix
        on_the_way = matrix * width * at_once + max(
            (joined - 1) * matrix * width * at_once, _temporaries(shape, matrix, base, width)
        )
    return LoadPeaks(host=host + on_host, gpu=max(static, sum(banks.values()) + on_the_way))


def _drawn(layers: Iterable[MoeLayer], base: str, width: int, banks: Mapping[int, int]) -> int:
    most = 0
    for shape in {layer.shape for layer in layers}:
        matrix = _larger_matrix(shape)
        drawn = shape.num_experts * shape.parameters_per_expert * width
        most = max(most, drawn + max(shape.num_experts * matrix, _temporaries(shape, matrix, base, width)))
    return sum(banks.values()) + most


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
        case "int8":  # from a float16 copy, some rows at a time
            return copy + 3 * min(n, INT8_AT_ONCE)
        case "mxfp4":
            return copy + (12 if width == 4 else 16) * min(n, INT8_AT_ONCE)
    return copy
