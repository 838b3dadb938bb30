"""Which attention a model runs; packed documents through variable-length attention, which needs no mask of S².

With `model.attention: sdpa`, packed documents share a row, and scaled dot-product attention keeps them apart by a mask
[B, 1, S, S]. On a GPU torch has a kernel (`torch.nn.attention.varlen`, flash attention) that is told where documents
begin instead. It gives the same values, so it is what `sdpa` means there. Borders come with the batch (`borders`),
under the names that transformers gives them (FlashAttentionKwargs), and reach each layer's attention as keywords.

Shapes: B rows of S tokens, T = B·S; h heads, h_kv of keys and values; d of queries and keys, d_v of values.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from moetune.config import RunConfig

VARLEN = "varlen"
"""Our name among transformers' attention functions. No mask function has it, so transformers makes no mask."""

_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # from torch 2.13 on

Capability = tuple[int, int]


def attention_for(
    config: RunConfig,
    settings: PretrainedConfig,
    model_class: type[PreTrainedModel],
    device: torch.device,
    capability: Capability | None,
) -> str:
    """The name of the attention that a model is built with.

    Args:
        settings: the model's configuration, its `dtype` set.
        capability: of the GPU that the model runs on; None for a CPU.
    """
    if config.model.attention == "flash_attention_2" and device.type == "meta":
        return VARLEN  # the package's kernels are those that torch has, and its borders come the same way
    if config.model.attention != "sdpa" or capability is None or not packs(config):
        return config.model.attention
    return VARLEN if takes_borders(settings, model_class, capability) else "sdpa"


def packs(config: RunConfig) -> bool:
    """Whether rows of a batch hold several documents; a run file without data is taken to."""
    return config.data is None or config.data.packing


def takes_borders(settings: PretrainedConfig, model_class: type[PreTrainedModel], capability: Capability) -> bool:
    """Whether every layer of a model can keep documents apart by their borders, on this GPU.

    Its attention has to be transformers' interface, without what the kernel does not do: sinks, soft-capping, sparse
    choices, dropout, heads of more than 256, or heads that need more shared memory than the card has.
    """
    text = settings.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    size = _head_size(text)
    return (
        capability >= (8, 0)
        and settings.dtype in (torch.float16, torch.bfloat16)
        and model_class._supports_flash_attn
        and model_class._supports_attention_backend
        and model_class._compatible_flash_implementations is None  # sinks, which need a kernel of their own
        and text.model_type not in _BY_MASK_ALONE
        and not hasattr(text, "attention_probs_dropout_prob")  # encoders, which see both ways
        and kinds <= {"full_attention", "sliding_attention"}
        and not any(getattr(text, name, None) for name in _NOT_DONE)
        and size is not None
        and size <= 256
        and not (has_little_shared_memory(capability) and 192 < size <= 224)
    )


_NOT_DONE = ("attn_logit_softcapping", "attention_dropout", "index_topk", "attention_chunk_size")
_BY_MASK_ALONE = ("afmoe", "nemotron", "opt", "phimoe")
"""Model types whose code does not tell attention of borders or windows but by the mask."""


def has_little_shared_memory(capability: Capability) -> bool:
    """99 KiB a block instead of 163 or more: consumer cards, and those made of the same chips."""
    return capability in ((8, 6), (8, 9), (12, 0), (12, 1))


def _head_size(text: PretrainedConfig) -> int | None:
    """d, of which values have at most as much; None if the configuration does not say."""
    if text.is_heterogeneous:  # it varies from layer to layer
        return None
    latent = [getattr(text, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if None not in latent:
        return sum(size for size in latent if size is not None)
    if getattr(text, "head_dim", None) is not None:
        return text.head_dim
    heads = getattr(text, "num_attention_heads", None)
    return text.hidden_size // heads if isinstance(heads, int) else None


# --- Borders ------------------------------------------------------------------------------------------------------


def wants_borders(model: PreTrainedModel) -> bool:
    """Whether packed documents have to be told apart by `borders`, because there is no mask."""
    return model.config.get_text_config()._attn_implementation in (VARLEN, "flash_attention_2")


def borders(lengths: Sequence[int]) -> dict[str, Any]:
    """What attention is told of documents that lie one after the other.

    Args:
        lengths: of every document of a batch, row by row; they sum to T.

    Returns:
        Where each begins, and T, int32 [n + 1]; and the longest, a number, so that no one waits for the device.
    """
    starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    longest = max(lengths)
    # Two tensors, as there are two on the device once a batch was copied there.
    ends = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts.clone()}
    return ends | {"max_length_q": longest, "max_length_k": longest}


def borders_of(positions_BS: Tensor) -> dict[str, Any]:
    """The same from positions on the host, which begin at 0 with every document and every row."""
    begins = (positions_BS.flatten() == 0).nonzero().flatten().tolist()
    return borders([end - begin for begin, end in zip(begins, [*begins[1:], positions_BS.numel()], strict=True)])


# --- The attention function ---------------------------------------------------------------------------------------


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each document: transformers' interface. A batch without borders has a document a row.

    Args:
        query: [B, h, S, d]; key [B, h_kv, S, d]; value [B, h_kv, S, d_v].

    Returns:
        [B, S, h, d_v], and no weights.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    assert max_length_q is not None
    rows, heads, length, size = query.shape
    size_v = value.shape[-1]
    scaling = size**-0.5 if scaling is None else scaling
    if size_v != size:  # the kernel has one size of heads
        value = pad(value, (0, size - size_v))
    if missing := -size % 8:
        query, key, value = (pad(tensor, (0, missing)) for tensor in (query, key, value))
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    if not _TAKES_GROUPS:
        k, v = (tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in (k, v))
    out = within_documents(q, k, v, cu_seq_lens_q, max_length_q, scaling, sliding_window or 0)
    return out.view(rows, length, heads, -1)[..., :size_v], None


def within_documents(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scaling: float, window: int
) -> Tensor:
    """Causal attention of q [T, h, d] to k and v [T, h_kv, d] of its own document, with a window to so many last tokens
    (0: all): torch's kernel, on CUDA only."""
    options: dict[str, Any] = {"scale": scaling, "window_size": (window - 1, 0)}
    if _TAKES_GROUPS:
        options["enable_gqa"] = True
    kernel: Any = varlen_attn
    return kernel(q, k, v, starts, starts, longest, longest, **options)


AttentionInterface.register(VARLEN, varlen_attention)
