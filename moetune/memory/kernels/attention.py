"""Scaled dot-product attention on fake tensors, by the operator that torch chooses on a GPU.

Torch chooses one of four operators for each call (cuDNN, flash, memory-efficient, math). They save and allocate
different memory, and only math has tensors of S². The rules are those of torch 2.11 to 2.15, built as its PyPI wheels
are (flash, memory-efficient and cuDNN kernels, cuDNN above 9.15.1), in `aten/src/ATen/native/transformers/`:

    cuda/sdp_utils.cpp      select_sdp_backend, priority_order, can_use_{cudnn,flash,mem_efficient}_attention
    sdp_utils_cpp.h         the checks that all devices share
    attention.cpp           scaled_dot_product_attention: what is done to masks and head sizes before the operator

All four operators compute shapes and derivatives on fake CPU tensors, so they run without a GPU.

Shapes: query [B, h, S, d], key [B, h_kv, S_k, d], value [B, h_kv, S_k, d_v], mask [B or 1, h or 1, S, S_k] for batch
B, heads h, key-value heads h_kv, lengths S and S_k, head sizes d and d_v. Comments name torch's functions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from moetune.adapt.attention import Capability, has_little_shared_memory

Kernel = Literal["cudnn", "flash", "efficient", "math"]

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


@contextmanager
def replace_attention(capability: Capability) -> Iterator[None]:
    """Replace `torch.nn.functional.scaled_dot_product_attention` by `attention` within the `with` block.

    The function itself is replaced, because torch disables a TorchFunctionMode during `Tensor.backward`, and so in
    recomputation under activation checkpointing.
    """
    functional: Any = torch.nn.functional
    own = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = partial(attention, capability)
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = own


def attention(
    capability: Capability,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention` by the operator that torch would choose on a GPU.

    All arguments but the first are those of torch's function. Returns [B, h, S, d_v], with the operator's strides.
    """
    kernel = choose_operator(capability, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:  # convert_boolean_attn_mask
        zero, hidden = (torch.scalar_tensor(number, dtype=query.dtype) for number in (0.0, -torch.inf))
        mask = torch.where(mask, zero, hidden)
    keeps = _needs_gradient(query, key, value)  # should_compute_logsumexp
    out: Tensor
    if kernel == "cudnn":
        out, *_ = aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, keeps, dropout_p, is_causal, scale=scale
        )
        return out
    if kernel == "flash":
        size = query.shape[-1]
        if missing := -size % 8:  # pad_last_dim<8>, post_process_flash_output
            query, key, value = (pad(tensor, (0, missing)) for tensor in (query, key, value))
        scale = size**-0.5 if scale is None else scale
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out[..., :size] if missing else out
    if kernel == "efficient":
        if mask is not None:  # preprocess_mask
            if any(stride % 8 for stride in mask.stride()[:-1]) or mask.stride(-1) != 1:
                last = mask.shape[-1]
                mask = pad(mask, (0, 8 - last % 8))[..., :last]
            mask = mask.expand(*query.shape[:-1], key.shape[-2])
        out, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, keeps, dropout_p, is_causal, scale=scale
        )
        return out
    out, _ = aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return out


# --- Choice of the operator ---------------------------------------------------------------------------------------


def choose_operator(
    capability: Capability,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Kernel:
    """Return the attention operator that torch would choose on a GPU, as its `select_sdp_backend` does.

    Arguments are those of `attention`. Operators that are disabled in this process
    (`torch.backends.cuda.enable_cudnn_sdp(False)` and the like) are not chosen.
    """
    tensors = (query, key, value)
    if any(tensor.dim() != 4 for tensor in tensors):  # check_tensor_shapes
        return "math"
    q, k, v = (tensor.shape for tensor in tensors)
    if not (q[0] == k[0] == v[0] and q[2] and k[2] and query.dtype == key.dtype == value.dtype):
        return "math"
    strides = [tensor.stride(-1) for tensor in tensors]
    mask_is_dense = mask is None or mask.stride(-1) == 1
    same_heads = q[1] == k[1] == v[1]  # check_batch_size_and_num_heads_dense
    heads = k[1] == v[1] and q[1] % k[1] == 0 if enable_gqa else same_heads
    trains = _needs_gradient(*tensors)
    dense = mask_is_dense and (all(stride == 1 for stride in strides) or q[3] == 1)

    def cudnn() -> bool:
        return (
            torch.backends.cuda.cudnn_sdp_enabled()
            and not torch.are_deterministic_algorithms_enabled()
            and heads
            and dense
            and query.dtype in _HALF
            and (mask is None or _cudnn_takes(mask, q, k))
            and max(q[3], v[3]) <= _cudnn_head_size(capability, (q[3], v[3]))
            and q[3] % 8 == v[3] % 8 == 0
            and k[2] != 1
        )

    def flash() -> bool:
        return (
            torch.backends.cuda.flash_sdp_enabled()
            and mask is None
            and heads
            and dense
            and q[3] == k[3] == v[3] <= 256
            and capability >= (8, 0)
            and query.dtype in _HALF
            and (not is_causal or q[2] == k[2])
            and not (trains and has_little_shared_memory(capability) and _flash_needs_much(q[3], dropout))
        )

    def efficient() -> bool:
        major = capability[0]
        aligned = 128 // (8 * query.element_size()) if major >= 8 or query.dtype in _HALF else 1
        return (
            torch.backends.cuda.mem_efficient_sdp_enabled()
            and same_heads  # the efficient kernel has no grouped heads
            and mask_is_dense
            and all(stride == 1 for stride in strides)
            and q[3] == k[3]
            and q[3] % aligned == v[3] % aligned == 0
            and query.dtype in ((*_HALF, torch.float32) if major >= 8 else (torch.float16, torch.float32))
        )

    if capability[0] in (9, 10) and cudnn():  # check_prefer_cudnn_attention; elsewhere ranked after math
        return "cudnn"
    return "flash" if flash() else "efficient" if efficient() else "math"


def _needs_gradient(*tensors: Tensor) -> bool:
    """Return whether autograd records an operation on these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _flash_needs_much(head_size: int, dropout: float) -> bool:
    """Return whether flash attention's backward needs more shared memory per block than cards with 99 KiB have.

    Source: check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120.
    """
    return 192 < head_size <= 224 or (head_size > 224 and dropout > 0)


def _cudnn_head_size(capability: Capability, sizes: tuple[int, int]) -> int:
    """Return cuDNN's largest head size, given (size of queries, size of values): check_cudnn_tensor_shapes."""
    return 256 if capability == (9, 0) else 192 if sizes == (192, 128) else 128


def _cudnn_takes(mask: Tensor, q: torch.Size, k: torch.Size) -> bool:
    """Return whether cuDNN supports a mask, for a query of shape `q` and a key of shape `k`: check_attn_mask_shape."""
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    full = (q[0], q[1], q[2], k[2])[-mask.dim() :]
    return all(size in (1, whole) for size, whole in zip(mask.shape, full, strict=True))
