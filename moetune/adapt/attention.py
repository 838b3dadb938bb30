"""Which attention a model runs; packed documents through variable-length attention, which needs no mask of S².

With `model.attention: sdpa`, packed documents share a row, and scaled dot-product attention keeps them apart by a mask
[B, 1, S, S]. On a GPU torch has a kernel (`torch.nn.attention.varlen`, flash attention) that takes the offsets of the
documents (`cu_seqlens`) instead. It gives the same values, so it is what `sdpa` means there. The offsets come with the
batch, named as in transformers' FlashAttentionKwargs, and reach each layer's attention as keywords.

Shapes: B rows of S tokens, T = B·S; h heads, h_kv of keys and values; d of queries and keys, d_v of values.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from moetune.compat.transformers import attention_of, fix_rotary_length, has_flash_interface, set_attention
from moetune.config.schema import RunConfig
from moetune.models.moe import is_experts
from moetune.models.stack import decoder_layers, decoder_stack

VARLEN = "varlen"
"""Our name among transformers' attention functions. No mask function has it, so transformers makes no mask."""

_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # from torch 2.13 on

Capability = tuple[int, int]


def attention_for(
    config: RunConfig,
    plain: PreTrainedModel,
    device: torch.device,
    capability: Capability | None,
) -> str:
    """The name of the attention that a model is built with.

    Args:
        plain: the model on the meta device.
        capability: of the GPU that the model runs on; None for a CPU.
    """
    if config.model.attention == "flash_attention_2" and device.type == "meta":
        return VARLEN  # the package's kernels are those that torch has, and its cu_seqlens come the same way
    if config.model.attention != "sdpa" or capability is None or not config.packs:
        return config.model.attention
    return VARLEN if takes_cu_seqlens(plain, capability) else "sdpa"


def takes_cu_seqlens(plain: PreTrainedModel, capability: Capability) -> bool:
    """Whether every layer of a model, on the meta device, can keep documents apart by their cu_seqlens, on this GPU.

    The kernel has no sinks, soft-capping, sparse choices, dropout, heads of more than 256, or heads that need more
    shared memory than the card has.
    """
    return (
        capability >= (8, 0)
        and plain.dtype in (torch.float16, torch.bfloat16)
        and has_flash_interface(plain)
        and (size := _largest_head(plain)) <= 256
        and not (has_little_shared_memory(capability) and 192 < size <= 224)
    )


_PROBE = "probe"
"""The name of an attention that computes nothing, and gets a mask."""
_NO = 1 << 30
"""A size of heads that no kernel has."""
_SINKS_AND_CAPS = ("s_aux", "softcap", "dropout", "indices")


def _largest_head(plain: PreTrainedModel) -> int:
    """The largest size of heads, if every attention gets cu_seqlens and the window that its mask has; else `_NO`.

    A copy on the meta device is run, whose masks are noted by the function that they are made of.
    """
    model = copy.deepcopy(plain).train()  # dropout is passed in training only
    windows: dict[int, int | None] = {}
    calls: list[tuple[nn.Module, int, bool]] = []

    def mask(*args: Any, mask_function: Any, **kwargs: Any) -> Tensor:
        made = torch.empty(1, 1, _ROW, _ROW, device="meta", dtype=torch.bool)
        keep.append(made)
        windows[id(made)] = _window_of(mask_function)
        return made

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, given: Any, **passed: Any) -> Any:
        window = windows.get(id(given))
        fits = "cu_seq_lens_q" in passed and window is not None and window == (passed.get("sliding_window") or 0)
        calls.append((module, query.shape[-1], fits and not any(passed.get(name) for name in _SINKS_AND_CAPS)))
        return value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    keep: list[Tensor] = []
    AttentionInterface.register(_PROBE, attention)
    AttentionMaskInterface.register(_PROBE, mask)
    for module in model.modules():
        fix_rotary_length(module)
        if isinstance(getattr(module, "config", None), PretrainedConfig):
            set_attention(module.config, _PROBE)
    for path in [path for path, module in model.named_modules() if is_experts(module)]:
        model.set_submodule(path, _NoExperts())
    ran: list[nn.Module] = []
    for layer in decoder_layers(model).values():
        layer.register_forward_hook(lambda layer, args, output: ran.append(layer))
    ids = torch.zeros(1, _ROW, dtype=torch.long, device="meta")
    try:
        with torch.no_grad():
            decoder_stack(model)(
                input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **cu_seqlens([_ROW])
            )
    except Exception:  # code that needs values, which a copy without storage does not have
        return _NO
    called = {module for module, _, _ in calls}
    all_fit = all(fits for _, _, fits in calls) and all(called & {*layer.modules()} for layer in ran)
    return max((size for _, size, _ in calls), default=_NO) if all_fit else _NO


_ROW = 8


def _window_of(mask_function: Any) -> int | None:
    """The window of a causal mask, 0 if it has none; None for a mask of another kind."""
    far = 1 << 22
    at = torch.arange(far)
    seen = torch.as_tensor(mask_function(torch.tensor(0), torch.tensor(0), torch.tensor(far - 1), at)).expand(far)
    window = int(seen.sum())
    is_causal = not torch.as_tensor(mask_function(torch.tensor(0), torch.tensor(0), torch.tensor(3), torch.tensor(4)))
    return (0 if window == far else window) if is_causal and bool(seen[far - window :].all()) else None


class _NoExperts(nn.Module):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


def has_little_shared_memory(capability: Capability) -> bool:
    """99 KiB a block instead of 163 or more: consumer cards, and those made of the same chips."""
    return capability in ((8, 6), (8, 9), (12, 0), (12, 1))


# --- Offsets ------------------------------------------------------------------------------------------------------


def wants_cu_seqlens(model: PreTrainedModel) -> bool:
    """Whether packed documents have to be told apart by `cu_seqlens`, because there is no mask."""
    return attention_of(model) in (VARLEN, "flash_attention_2")


def cu_seqlens(lengths: Sequence[int]) -> dict[str, Any]:
    """The keywords by which attention keeps documents apart that lie one after the other.

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


def cu_seqlens_of(positions_BS: Tensor) -> dict[str, Any]:
    """The same from positions on the host, which begin at 0 with every document and every row."""
    begins = (positions_BS.flatten() == 0).nonzero().flatten().tolist()
    return cu_seqlens([end - begin for begin, end in zip(begins, [*begins[1:], positions_BS.numel()], strict=True)])


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
    """Causal attention within each document: transformers' interface. A batch without cu_seqlens has a document a row.

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
