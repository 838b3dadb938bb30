"""What CUDA kernels take and free inside themselves, by operation.

Sizes are requested bytes; all of an operation's are alive at once, beside its outputs, and gone when it returns. The
sources are torch's, 2.11 to 2.13; each function names the file and the function that allocates.

Shapes: query [B, h, S, d], key [B, h_kv, S_k, d], value [B, h_kv, S_k, d_v].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import bitsandbytes.autograd  # noqa: F401  defines its operators
import torch
import torch.nn.attention.varlen  # defines its operators
from torch import Tensor

from moetune.adapt.attention import Capability, has_little_shared_memory
from moetune.experts.kernels.grouped import runs_as_one

aten = torch.ops.aten
FLOAT = 4


def before(func: Any, capability: Capability, args: Any, kwargs: Any) -> Iterable[int]:
    """Bytes that an operation takes before its outputs."""
    return _FIRST[func](capability, *args, **kwargs) if func in _FIRST else ()


def after(func: Any, capability: Capability, args: Any) -> Iterable[int]:
    """Bytes that an operation takes once its outputs are there."""
    return _TAKEN[func](capability, *args) if func in _TAKEN else ()


def _ceil(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _copy_unless_dense(tensor: Tensor) -> int:
    """Bytes of the copy that a kernel makes of a [B, h, S, d] tensor whose heads do not lie inside its tokens."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else tensor.numel() * tensor.element_size()


def _flash_backward(
    capability: Capability, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *_: Any
) -> Iterator[int]:
    """cuda/attention_backward.cu: _flash_attention_backward; cuda/flash_attn/flash_api.cpp: mha_bwd.

    Row sums and dQ in float32, with grouped heads dK and dV of all query heads.
    """
    batch, heads, length, size = query.shape
    rounded = _ceil(length, 128)
    yield _copy_unless_dense(gradient)
    yield _copy_unless_dense(out)
    yield batch * heads * rounded * FLOAT
    yield batch * rounded * heads * _flash_size(size) * FLOAT
    if key.shape[1] != heads:
        yield from [batch * key.shape[2] * heads * size * key.element_size()] * 2


def _flash_varlen_backward(
    capability: Capability,
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    starts: Tensor,
    *_: Any,
) -> Iterator[int]:
    """cuda/flash_attn/flash_api.cpp: mha_varlen_bwd. Query [T, h, d], `starts` of the documents and their end [n + 1].

    128 rows beside each document's own, so that no two touch.
    """
    tokens, heads, size = query.shape
    rows = tokens + 128 * (starts.shape[0] - 1)
    for tensor in (gradient, out):
        yield 0 if tensor.is_contiguous() else tensor.numel() * tensor.element_size()
    yield heads * rows * FLOAT
    yield rows * heads * _flash_size(size) * FLOAT
    if key.shape[1] != heads:
        yield from [key.shape[0] * heads * size * key.element_size()] * 2


def _flash_size(head_size: int) -> int:
    """head_size_rounded."""
    return _ceil(head_size, 32 if head_size <= 128 else 64)


def _efficient_forward(capability: Capability, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Iterator[int]:
    """cuda/attention.cu: _efficient_attention_forward; mem_eff_attention/kernel_forward.h:
    kNeedsOutputAccumulatorBuffer. A head that does not fit one block of keys is added up in float32."""
    if max(query.shape[-1], value.shape[-1]) > 128 and query.element_size() < FLOAT:
        yield query.shape[0] * query.shape[1] * query.shape[2] * value.shape[-1] * FLOAT


def _efficient_backward(
    capability: Capability, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Any, *_: Any
) -> Iterator[int]:
    """cuda/attention_backward.cu: _efficient_attention_backward; mem_eff_attention/kernel_backward.h:
    Params::workspace_size. Row sums in float32; dQ in float32, in tiles; dK and dV too where a tile is narrower than a
    head.
    """
    batch, heads, length, size = query.shape
    keys, size_v = key.shape[2], value.shape[-1]
    is_half = query.element_size() < FLOAT
    block_i, block_j, most = _tile(capability, max(size, size_v), is_half)
    row_sums = batch * heads * length * FLOAT
    blocks, columns = -(-length // block_i), -(-size // block_j)
    # GradQTempStorage: a lock and a counter, a tile
    workspace = batch * heads * blocks * columns * (16 + block_i * block_j * FLOAT)
    yield _copy_unless_dense(gradient)
    yield row_sums
    if not is_half:  # the row sums are a product and its sum, gone before the workspace comes
        yield max(workspace, gradient.numel() * FLOAT + row_sums)
        return
    yield workspace
    if most > block_i:
        splits = max(1, min(-(-keys // block_j), 200 // (batch * heads)))
        yield batch * heads * splits * block_j * (_ceil(size, block_i) + _ceil(size_v, block_i)) * FLOAT


_EVERY_SIZE = 65536


def _tile(capability: Capability, head_size: int, is_half: bool) -> tuple[int, int, int]:
    """(queries, keys, largest head) of the first kernel that takes this head on this card: dispatch_cutlassB_*_sm80 in
    mem_eff_attention/kernels/cutlassB.h, less those that need more shared memory than it has."""
    little = has_little_shared_memory(capability)
    if capability < (8, 0):
        kernels = [(64, 64, 32), (64, 64, 64), (64, 64, 128), (64, 64, _EVERY_SIZE)]
    elif is_half:
        kernels = [(64, 64, 32), (64, 64, 64)]
        kernels += [(128, 64, 96)] if capability in ((8, 6), (8, 9)) else []
        kernels += [(64, 64, 128) if little else (128, 128, 128), (128, 64, _EVERY_SIZE)]
    else:
        rows = 64 if little else 128
        kernels = [(64, 64, 32), (64, 64, 64), (rows, 64, 128), (rows, 64, _EVERY_SIZE)]
    return next(kernel for kernel in kernels if kernel[2] >= head_size)


def _cudnn_backward(
    capability: Capability, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> Iterator[int]:
    """cudnn/MHA.cpp: run_cudnn_SDP_bprop takes what the plan asks for. Not seen on a card: row sums and dQ in float32,
    with grouped heads dK and dV of all query heads, as cudnn-frontend's CompositeSDPABackwardNode names them
    (scaled_dot_product_flash_attention.h: softmax_sum, dQ_accum, dK_fullhead, dV_fullhead).
    """
    batch, heads, length, size = query.shape
    yield batch * heads * length * FLOAT
    yield batch * heads * length * size * FLOAT
    if key.shape[1] != heads:
        yield from (batch * heads * key.shape[2] * t.shape[-1] * key.element_size() for t in (key, value))


def _softmax_backward(capability: Capability, gradient: Tensor, output: Tensor, *_: Any) -> Iterator[int]:
    """cuda/SoftMax.cu: softmax_backward_cuda_out multiplies gradient and output first."""
    yield gradient.numel() * gradient.element_size()


def _safe_softmax(capability: Capability, scores: Tensor, *_: Any) -> Iterator[int]:
    """SoftMax.cpp: _safe_softmax keeps the plain softmax and what is masked until rows without any key are zero."""
    yield scores.numel() * (scores.element_size() + 1)


def _embedding_backward(capability: Capability, gradient: Tensor, indices: Tensor, *_: Any) -> Iterator[int]:
    """cuda/Embedding.cu: embedding_dense_backward_cuda; cuda/EmbeddingBackwardKernel.cu.

    Of more than 3,072 tokens: sorted and original places, and sums in float32 of up to ten equal tokens, here taken to
    be as many as tokens, which is the most.
    """
    if (tokens := indices.numel()) > 3072:
        yield 4 * tokens * indices.element_size()
        yield tokens * _ceil(gradient.shape[-1], 32) * FLOAT


def _gemm_4bit(
    capability: Capability,
    rows: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Iterator[int]:
    """bitsandbytes/backends/cuda/ops.py: _dequant_linear_fallback; rows [.., K], a weight of `shape` [N, K].

    The weight as it is multiplied, and its scales in float32, before and after their mean is added. From 512 rows on a
    weight of 4M is always unpacked so (_gemm_4bit_use_custom_cuda); below, what is noted here may not be taken.
    """
    if absmax_8bit is not None:
        yield from [absmax_8bit.numel() * FLOAT] * 2
    yield math.prod(shape) * rows.element_size()


def _sort(capability: Capability, keys: Tensor, *_: Any) -> Iterator[int]:
    """cuda/Sort.cpp: sort_cuda_kernel; cuda/Sort.cu: launch_stable_sort_kernel, of whole numbers [n].

    The numbers 0 to n - 1; above 4,096 what cub's radix sort asks for, in one piece: counts of 256 digits in a pass for
    each byte of a number, if there are several both arrays once more, and 1 KiB for each few thousand numbers, which is
    left out here: it is no product of sizes.
    """
    if keys.dim() == 1 and not keys.is_floating_point():
        n, passes = keys.numel(), keys.element_size()
        yield 8 * n
        if n > 4096:
            yield from ((8 + passes) * n if passes > 1 else 0, 8 * passes * 256 + 511)


def _grouped_mm(capability: Capability, a: Tensor, b: Tensor, ends: Tensor, counts: Sequence[int]) -> Iterator[int]:
    """cuda/GroupMM.cu: bf16bf16_grouped_gemm_impl_sm90_sm100: of each of C products three sizes, addresses and strides;
    CUTLASS's four descriptors for each of 132 multiprocessors. Seen on 9.0 alone."""
    if capability[0] == 9 and runs_as_one(capability, a, b):
        yield len(counts) * (3 * 4 + 3 * 8 + 3 * 8)
        yield 132 * 4 * 128


HOST_OUTPUTS: dict[Any, tuple[int, ...]] = {aten._scaled_dot_product_efficient_attention.default: (2, 3)}
"""By operation, which of its outputs are on the host: the seed and the offset of dropout (cuda/attention.cu:
_efficient_attention_forward)."""
_FIRST: dict[Any, Callable[..., Iterator[int]]] = {torch.ops.bitsandbytes.gemm_4bit.default: _gemm_4bit}
"""By operation, what it takes before its output."""
_TAKEN: dict[Any, Callable[..., Iterator[int]]] = {
    aten.sort.stable: _sort,
    torch.ops.moetune.grouped_mm.default: _grouped_mm,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._safe_softmax.default: _safe_softmax,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    torch.ops.torch_attn._varlen_attn_backward.default: _flash_varlen_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
}
"""By operation, what it takes once its outputs are there."""
