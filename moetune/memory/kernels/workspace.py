"""Workspaces that CUDA kernels allocate and free within an operation; not cuBLAS's.

`Trace.workspaces` has cuBLAS's (`cublas_workspace` in gpus.yaml), which is allocated once for each thread. Here
sizes are as requested from the allocator, before rounding. All workspaces of an operation are alive at once, beside its
outputs, and freed when it returns. Each private function yields the workspaces of one operation from its arguments and
names its source: the file and function of torch 2.11 to 2.15 that allocates.

Shapes: query [B, h, S, d], key [B, h_kv, S_k, d], value [B, h_kv, S_k, d_v] for batch B, heads h, key-value heads h_kv,
lengths S and S_k, head sizes d and d_v; gradients are those of the output, [B, h, S, d_v].
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import moetune.compat.bitsandbytes  # noqa: F401  defines its operators
from moetune.adapt.attention import Capability, has_little_shared_memory
from moetune.kernels.grouped import kernel_of

aten = torch.ops.aten
FLOAT = 4
"""Bytes of a float32."""


def on_cpu(func: Any, args: Any) -> Iterator[int]:
    """Yield the bytes that an operation takes on a CPU while it runs, beside its results; nothing for most operations.

    bitsandbytes has no CPU kernel that quantizes to 4 bits: operations of torch hold a copy of n weights in float32 (if
    they are stored otherwise), the scaled weights in float32, their codes as int32, and these in 8 bits. gpt-oss's
    SwiGLU holds two tensors of its result's size beside the result, which is counted here, too.
    """
    if func is torch.ops.bitsandbytes.quantize_4bit.default:
        weight = args[0]
        yield weight.numel() * (9 + 4 * (weight.dtype != torch.float32))
    if func is torch.ops.moetune.gated.default and args[3]:
        yield 3 * args[0].numel() // 2 * args[0].element_size()


def before(func: Any, capability: Capability, args: Any, kwargs: Any) -> Iterable[int]:
    """Return the bytes of each workspace that the operator `func` allocates before its outputs; empty if none."""
    return _BEFORE[func](capability, *args, **kwargs) if func in _BEFORE else ()


def after(func: Any, capability: Capability, args: Any) -> Iterable[int]:
    """Return the bytes of each workspace that the operator `func` allocates after its outputs; empty if none."""
    return _AFTER[func](capability, *args) if func in _AFTER else ()


def _ceil(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _copy_unless_dense(tensor: Tensor) -> int:
    """Return the bytes of the copy that a kernel makes of a [B, h, S, d] tensor; 0, because it makes none, if the
    memory is contiguous in the order [B, S, h, d]."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else tensor.numel() * tensor.element_size()


def _flash_backward(
    capability: Capability, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *_: Any
) -> Iterator[int]:
    """Yield the workspaces of flash attention's backward: row sums and dQ in float32.

    Also copies of the gradient and the output unless their memory is in the order [B, S, h, d]; with grouped heads, dK
    and dV of all query heads. Source: cuda/attention_backward.cu: _flash_attention_backward;
    cuda/flash_attn/flash_api.cpp: mha_bwd.
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
    """Yield the workspaces of flash attention's backward on n packed documents of T tokens together.

    They are those of `_flash_backward`, with 128 more rows per document. query, key and value are [T, h, d]; `starts`
    [n + 1] are the cumulative lengths (cu_seqlens). Source: cuda/flash_attn/flash_api.cpp: mha_varlen_bwd.
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
    """Return the head size to which flash attention pads: head_size_rounded in flash_api.cpp."""
    return _ceil(head_size, 32 if head_size <= 128 else 64)


def _efficient_forward(capability: Capability, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Iterator[int]:
    """Yield memory-efficient attention's workspace: for 16-bit heads larger than 128, an accumulator of the output in
    float32. Source: cuda/attention.cu: _efficient_attention_forward; mem_eff_attention/kernel_forward.h:
    kNeedsOutputAccumulatorBuffer."""
    if max(query.shape[-1], value.shape[-1]) > 128 and query.element_size() < FLOAT:
        yield query.shape[0] * query.shape[1] * query.shape[2] * value.shape[-1] * FLOAT


def _efficient_backward(
    capability: Capability, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Any, *_: Any
) -> Iterator[int]:
    """Yield the workspaces of memory-efficient attention's backward: row sums in float32, and dQ in float32 by tiles.

    If a tile is narrower than a head, also dK and dV in float32. Source: cuda/attention_backward.cu:
    _efficient_attention_backward; mem_eff_attention/kernel_backward.h: Params::workspace_size.
    """
    batch, heads, length, size = query.shape
    keys, size_v = key.shape[2], value.shape[-1]
    is_half = query.element_size() < FLOAT
    block_i, block_j, most = _tile(capability, max(size, size_v), is_half)
    row_sums = batch * heads * length * FLOAT
    blocks, columns = -(-length // block_i), -(-size // block_j)
    # GradQTempStorage: 16 bytes for a lock and a counter, and a tile
    workspace = batch * heads * blocks * columns * (16 + block_i * block_j * FLOAT)
    yield _copy_unless_dense(gradient)
    yield row_sums
    if not is_half:  # row sums need a float32 product, freed before the workspace is allocated
        yield max(workspace, gradient.numel() * FLOAT + row_sums)
        return
    yield workspace
    if most > block_i:
        splits = max(1, min(-(-keys // block_j), 200 // (batch * heads)))
        yield batch * heads * splits * block_j * (_ceil(size, block_i) + _ceil(size_v, block_i)) * FLOAT


_EVERY_SIZE = 65536
"""Limit of the head size in kernels without a limit."""


def _tile(capability: Capability, head_size: int, is_half: bool) -> tuple[int, int, int]:
    """Return the tile of memory-efficient attention's backward: (rows of queries, rows of keys, largest head size).

    Torch chooses the kernel by head size, for 16-bit dtypes or others. Source: dispatch_cutlassB_*_sm80 in
    mem_eff_attention/kernels/cutlassB.h, without the kernels that need more shared memory than the card has.
    """
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
    """Yield the workspaces of cuDNN attention's backward: row sums and dQ in float32; with grouped heads, all heads' dK
    and dV.

    Not verified on a card: cudnn/MHA.cpp: run_cudnn_SDP_bprop allocates what cuDNN's plan requests. These tensors are
    those of cudnn-frontend's CompositeSDPABackwardNode (scaled_dot_product_flash_attention.h: softmax_sum, dQ_accum,
    dK_fullhead, dV_fullhead).
    """
    batch, heads, length, size = query.shape
    yield batch * heads * length * FLOAT
    yield batch * heads * length * size * FLOAT
    if key.shape[1] != heads:
        yield from (batch * heads * key.shape[2] * t.shape[-1] * key.element_size() for t in (key, value))


def _softmax_backward(capability: Capability, gradient: Tensor, output: Tensor, *_: Any) -> Iterator[int]:
    """Yield the workspace of softmax's backward, gradient · output. Source: cuda/SoftMax.cu:
    softmax_backward_cuda_out."""
    yield gradient.numel() * gradient.element_size()


def _safe_softmax(capability: Capability, scores: Tensor, *_: Any) -> Iterator[int]:
    """Yield the workspace of safe softmax: the plain softmax, and a byte per element to find fully masked rows. Source:
    SoftMax.cpp: _safe_softmax."""
    yield scores.numel() * (scores.element_size() + 1)


def _embedding_backward(capability: Capability, gradient: Tensor, indices: Tensor, *_: Any) -> Iterator[int]:
    """Yield the workspaces of an embedding's backward: sorted indices, and partial sums of gradients in float32.

    Up to 3,072 tokens it has none. A partial sum adds up to ten equal tokens; one for each token is assumed, an upper
    bound. Source: cuda/Embedding.cu: embedding_dense_backward_cuda; cuda/EmbeddingBackwardKernel.cu.
    """
    if (tokens := indices.numel()) > 3072:
        yield 4 * tokens * indices.element_size()
        yield tokens * _ceil(gradient.shape[-1], 32) * FLOAT


def _gemm_4bit(
    capability: Capability,
    rows: Tensor,
    quantized: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Iterator[int]:
    """Yield the workspaces of rows [..., K] times a 4-bit weight of `shape` (N, K): above all the dequantized weight.

    With double quantization (`absmax_8bit` given), also two copies of the weight's scales in float32.

    From 512 rows on a weight of 4M elements is always dequantized (_gemm_4bit_use_custom_cuda); with fewer rows another
    kernel without these workspaces may run. Source: bitsandbytes/backends/cuda/ops.py: _dequant_linear_fallback.
    """
    if absmax_8bit is not None:
        yield from [absmax_8bit.numel() * FLOAT] * 2
    yield math.prod(shape) * rows.element_size()


def _sort(capability: Capability, keys: Tensor, *_: Any) -> Iterator[int]:
    """Yield the workspaces of a stable sort of integers [n]: the indices, and above 4,096 elements those of cub's radix
    sort.

    cub makes one pass for each byte of an element, with 256 counts each; with more than one pass it allocates keys and
    indices once more. It also takes 1 KiB for every few thousand elements, left out because it is no product of sizes.
    Source: cuda/Sort.cpp: sort_cuda_kernel; cuda/Sort.cu: launch_stable_sort_kernel.
    """
    if keys.dim() == 1 and not keys.is_floating_point():
        n, passes = keys.numel(), keys.element_size()
        yield 8 * n
        if n > 4096:
            yield from ((8 + passes) * n if passes > 1 else 0, 8 * passes * 256 + 511)


def _grouped_mm(capability: Capability, a: Tensor, b: Tensor, ends: Tensor, counts: Sequence[int]) -> Iterator[int]:
    """Yield the workspaces of torch's grouped product on compute capability 9.x; none if torch's kernel is not used.

    `ends` has an element for each expert. First the arguments of all products: for each, 3 sizes of 4 bytes, 3
    addresses and 3 strides of 8 bytes. Then CUTLASS's tensor descriptors: 4 of 128 bytes per multiprocessor, of which
    132 are assumed (H100 SXM). Verified on 9.0 only. Source: cuda/GroupMM.cu: bf16bf16_grouped_gemm_impl_sm90_sm100.
    """
    if kernel_of(capability, a, b) == "torch":
        yield len(ends) * (3 * 4 + 3 * 8 + 3 * 8)
        yield 132 * 4 * 128


def _sorted_positions(capability: Capability, numbers: Tensor, count: int) -> Iterator[int]:
    """Yield the workspace for sorting rows by expert (`numbers` [n], `count` experts): for each 512 rows an int32 per
    expert, the number of experts rounded up to a power of two.

    Source: kernels/triton_routing.py.
    """
    yield -(-numbers.numel() // 512) * FLOAT * (1 << (count - 1).bit_length())


HOST_OUTPUTS: dict[Any, tuple[int, ...]] = (
    {aten._scaled_dot_product_efficient_attention.default: (2, 3)} if torch.__version__ < "2.14" else {}
)
"""Operator -> indices of its outputs in host memory: the seed and the offset of dropout (cuda/attention.cu:
_efficient_attention_forward), which torch 2.14 has on the GPU."""
_BEFORE: dict[Any, Callable[..., Iterator[int]]] = {torch.ops.bitsandbytes.gemm_4bit.default: _gemm_4bit}
"""Operator -> function that yields the workspaces allocated before its output."""
_AFTER: dict[Any, Callable[..., Iterator[int]]] = {
    aten.sort.stable: _sort,
    torch.ops.moetune.grouped_mm.default: _grouped_mm,
    torch.ops.moetune.sorted_positions.default: _sorted_positions,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._safe_softmax.default: _safe_softmax,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    torch.ops.aten._flash_attention_backward.default: _flash_varlen_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
}
"""Operator -> function that yields the workspaces allocated after its outputs."""
