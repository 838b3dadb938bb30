"""The peaks before the first step: what loading takes on the GPU and on the host, beside what stays there.

What quantizing a matrix takes is traced; what arrives at once follows from how checkpoints hold experts.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moetune.adapt.weights.quantizer import merges_experts
from moetune.config.schema import ResolvedModelConfig, Storage
from moetune.experts.quantized import BLOCK, QuantizedExperts
from moetune.memory.report import LoadPeaks
from moetune.memory.trace.tracker import Tracker
from moetune.memory.trace.views import Trace
from moetune.models.moe import ExpertShape
from moetune.run.resolve import ResolvedRun


def load_peaks(run: ResolvedRun, traced: Trace) -> LoadPeaks:
    """The most that loading takes.

    A checkpoint: the banks are there from the start, and tensor by tensor the rest arrives. Where it holds experts one
    by one, an expert's gate and up come, are joined, and quantized: three times the matrix. Where it holds a layer's
    experts in one stack, that comes whole; if in MXFP4, expert by expert, and stays as it is. The host holds one such
    piece, or the embedding, on its way; its files are mapped, which is memory that the system takes back when it needs
    any.

    Random weights: the banks are there, and one after the other is filled. Weights are drawn a layer's experts at a
    time, with a mask of one byte a weight that checks the draw; the embedding and the head come last. A linear layer on
    its way is taken to be no larger than they are.

    Args:
        traced: a step of the run, which begins with what stays after loading.
    """
    structure, model = run.structure, run.config.model
    on_gpu, on_host = (traced.loaded(on_host=where) for where in (False, True))
    dtype = torch.float32 if model.dtype == "fp32" else torch.bfloat16  # auto is that of a GPU
    outside = max(part.numel for part in structure.parameters if part.layer is None)
    shapes = list(dict.fromkeys(layer.shape for layer in structure.moe_layers))
    if model.weights == "random":
        drawn = [
            shape.num_experts * shape.parameters_per_expert * dtype.itemsize
            + max(shape.num_experts * _gate_up(shape), _quantizing(shape, model, dtype))
            for shape in shapes
        ]
        banks = traced.loaded(in_bank=True) + max(drawn) if drawn else 0
        return LoadPeaks(host=on_host, gpu=max(on_gpu + outside, banks))
    host, on_the_way = outside * dtype.itemsize, 0
    if shapes:
        shape = shapes[0]
        matrix = _gate_up(shape)
        if run.model.published.method == "mxfp4":  # as it is, unless it is quantized otherwise, or trains
            host = max(host, matrix * 17 // 32)
            if model.base != "mxfp4" or run.config.adapt.experts is not None:
                # transformers looks half of the weights up at a time, by indices that torch widens to 8 bytes
                looked_up = matrix * 17 // 32 + matrix // 8 + (2 + 4 + dtype.itemsize + dtype.itemsize // 2) * matrix
                on_the_way = max(looked_up, matrix * dtype.itemsize + _quantizing(shape, model, dtype))
        else:
            merges = merges_experts(structure.model_type)
            host = max(host, matrix * dtype.itemsize * (1 if merges else shape.num_experts))
            pieces = 3 if merges else shape.num_experts
            on_the_way = pieces * matrix * dtype.itemsize + _quantizing(shape, model, dtype)
    return LoadPeaks(host=host + on_host, gpu=on_gpu + on_the_way)


def _gate_up(shape: ExpertShape) -> int:
    """Weights of an expert's larger matrix."""
    return shape.hidden * shape.intermediate * (2 if shape.has_gate else 1)


def _quantizing(shape: ExpertShape, model: ResolvedModelConfig, dtype: torch.dtype) -> int:
    rows = _gate_up(shape) // shape.hidden
    return quantizing((rows, shape.hidden), model.base, model.double_quant, dtype, shape.is_transposed)


@cache
def quantizing(
    shape: tuple[int, int], storage: Storage, double_quant: bool, dtype: torch.dtype, is_transposed: bool
) -> int:
    """Bytes that quantizing a matrix takes at most, beside the matrix and its place in a bank: traced.

    Args:
        is_transposed: it lies the other way round, and is copied.
    """
    tiny = QuantizedExperts(1, (BLOCK, BLOCK), storage, double_quant=double_quant)
    tiny.quantize_(0, torch.zeros(BLOCK, BLOCK, dtype=dtype))  # bitsandbytes keeps a table that is no fake one
    stack = QuantizedExperts(1, shape, storage, double_quant=double_quant, device="meta")
    with FakeTensorMode(allow_non_fake_inputs=True), Tracker({}) as tracker:
        stack.to_empty(device="cpu")
        weight: Tensor = torch.empty(shape[::-1], dtype=dtype).T if is_transposed else torch.empty(shape, dtype=dtype)
        before = tracker.peak_bytes
        stack.quantize_(0, weight)
    return tracker.peak_bytes - before
