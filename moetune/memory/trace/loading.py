"""Peaks of GPU and host memory while weights are loaded, before the first step.

Quantization of one matrix is traced on fake tensors. How much of a checkpoint is in memory at once follows from how
checkpoints of the model type store experts (`expert_layout`).
"""

from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moetune.config.schema import Storage, storage_in
from moetune.experts.quantized import QuantizedExperts
from moetune.formats.nf4 import BLOCK
from moetune.formats.table import FORMATS
from moetune.memory.report import LoadPeaks
from moetune.memory.trace.tracker import Tracker
from moetune.memory.trace.views import Trace
from moetune.models.hub.key_mapping import expert_layout
from moetune.models.moe import ExpertShape
from moetune.run.resolve import ResolvedRun


def load_peaks(run: ResolvedRun, traced: Trace) -> LoadPeaks:
    """Compute the peaks of GPU and host memory, in bytes, while the weights of a run are loaded.

    Weights from a checkpoint: the expert banks are allocated first, then experts are read one by one, then all other
    weights. The GPU's peak is the larger of all loaded weights, and the banks plus one expert's gate_up matrix while it
    is read and quantized:

    - A checkpoint with separate gate and up tensors: both are read and joined, which takes twice the matrix's bytes.
    - A checkpoint with all experts of a layer in one tensor: one expert is read at a time, unless the tensor has to be
      converted (`expert_layout`), which reads all of it.
    - Weights are read in the dtype that `config.json` names. If it names none, or the checkpoint is quantized, they are
      read in the compute dtype. The largest of the other weights is also held in both dtypes while it is converted.
    - An MXFP4 checkpoint (17/32 bytes a weight): kept as it is, unless the base has another storage or experts train.
    - An FP8, NVFP4 or INT4 checkpoint: kept as it is under the same conditions.

    The host's peak is what stays in host memory plus the tensor that is being read, an expert's or the embedding. An
    embedding that stays on the host is read block by block.

    Random weights: banks are allocated, then filled one after the other. All experts of a layer are drawn at once, with
    a mask of one byte a weight that checks the draw. The embedding and the LM head are drawn last; no linear layer is
    assumed to be larger than these. The host's peak is what stays in host memory.

    `traced` is a prediction of the same run by trace; only the bytes of its loaded weights are used.
    """
    structure, model, published = run.structure, run.config.model, run.model.source.quantization
    on_gpu, on_host = (traced.loaded(on_host=where) for where in (False, True))
    dtype = torch.float32 if model.dtype == "fp32" else torch.bfloat16  # `auto` is bf16 on a GPU
    on_host_only = {f"{path}.weight" for path in run.tables_on_host}  # read there block by block
    others = (part for part in structure.parameters if part.layer is None and part.name not in on_host_only)
    outside = max((part.numel for part in others), default=0)
    stored_as = {layer: model.storage_of("experts", layer.index) for layer in structure.moe_layers}
    kinds = {
        (layer.shape, storage, storage == storage_in(published.base, "experts", layer.index))
        for layer, storage in stored_as.items()
    }
    if model.weights == "random":
        drawn = [
            shape.num_experts * shape.parameters_per_expert * dtype.itemsize
            + max(shape.num_experts * _gate_up(shape), _quantizing(shape, storage, run, dtype))
            for shape, storage, _ in kinds
        ]
        banks = traced.loaded(in_bank=True) + max(drawn) if drawn else 0
        return LoadPeaks(host=on_host, gpu=max(on_gpu + outside, banks))
    stored = run.model.source.config.dtype
    if isinstance(stored, torch.dtype) and stored != dtype and not published.method:
        dtype = stored  # weights are quantized from the dtype of the checkpoint
        on_gpu += outside * dtype.itemsize  # the largest of the others, while it is converted
    host, on_the_way = outside * dtype.itemsize, 0
    for shape, storage, is_published in kinds:
        matrix, read = _gate_up(shape), 0
        is_kept = is_published and run.config.adapt.experts is None
        if is_kept and FORMATS[storage].is_read_apart:
            format = FORMATS[storage]
            host = max(host, int(matrix * (format.bits / 8 + format.unpacked_by)))
        elif published.method == "mxfp4":
            host = max(host, matrix * 17 // 32)
            # transformers dequantizes half of the weights at a time by a lookup with indices of 8 bytes
            looked_up = matrix * 17 // 32 + matrix // 8 + (2 + 4 + dtype.itemsize + dtype.itemsize // 2) * matrix
            read = max(looked_up, matrix * dtype.itemsize + _quantizing(shape, storage, run, dtype))
        else:
            layout = expert_layout(structure.model_type)
            read = matrix * dtype.itemsize * (shape.num_experts if layout == "converted" else 1)
            host = max(host, read)
            read += max(0 if layout == "rows" else read, _quantizing(shape, storage, run, dtype))
        on_the_way = max(on_the_way, read + traced.loaded(in_bank=True))
    return LoadPeaks(host=host + on_host, gpu=max(on_gpu, on_the_way))


def _gate_up(shape: ExpertShape) -> int:
    """Return the number of weights in an expert's gate_up matrix, the larger of its two."""
    return shape.hidden * shape.intermediate * (2 if shape.has_gate else 1)


def _quantizing(shape: ExpertShape, storage: Storage, run: ResolvedRun, dtype: torch.dtype) -> int:
    """Return the peak of temporary bytes while an expert's gate_up matrix is quantized (see `quantizing`)."""
    rows, model = _gate_up(shape) // shape.hidden, run.config.model
    on_cpu = run.device_type == "cpu"
    return quantizing((rows, shape.hidden), storage, model.double_quant, dtype, shape.is_transposed, on_cpu)


@cache
def quantizing(
    shape: tuple[int, int], storage: Storage, double_quant: bool, dtype: torch.dtype, is_transposed: bool, on_cpu: bool
) -> int:
    """Return the peak of temporary bytes while one matrix is quantized, by a trace on fake tensors; cached. The matrix
    itself and its buffers in the expert bank are not counted.

    Args:
        shape: (rows, columns) of the matrix.
        storage, double_quant: format of the quantized weights, and whether their constants are quantized too.
        dtype: dtype of the matrix.
        is_transposed: whether the matrix is a transposed view, which quantization has to copy first.
        on_cpu: whether a CPU quantizes it.
    """
    tiny = QuantizedExperts(1, (BLOCK, BLOCK), storage, double_quant=double_quant)
    tiny.quantize_(0, torch.zeros(BLOCK, BLOCK, dtype=dtype))  # creates the real lookup table that bitsandbytes caches
    stack = QuantizedExperts(1, shape, storage, double_quant=double_quant, device="meta")
    with FakeTensorMode(allow_non_fake_inputs=True), Tracker({}, on_cpu=on_cpu) as tracker:
        stack.to_empty(device="cpu")
        weight: Tensor = torch.empty(shape[::-1], dtype=dtype).T if is_transposed else torch.empty(shape, dtype=dtype)
        before = tracker.peak_bytes
        stack.quantize_(0, weight)
    return tracker.peak_bytes - before
