"""Select a model's attention function; run packed documents with variable-length attention, without a mask.

With `model.attention: sdpa`, packed documents share a row, and scaled dot-product attention separates them by a mask
[B, 1, S, S]. On a GPU, torch's flash attention (`torch.nn.attention.varlen`) computes the same values from the offsets
of the documents (`cu_seqlens`), so `sdpa` selects it where it can be used. The offsets are part of the batch, under the
names of transformers' FlashAttentionKwargs, and reach each layer's attention function as keyword arguments.

Shapes: B rows of S tokens, T = B·S tokens; h heads of queries, h_kv heads of keys and values; head size d of queries
and keys, d_v of values; n documents.
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

from moetune.compat.transformers import attention_name, fix_rotary_length, has_flash_interface, set_attention
from moetune.config.schema import RunConfig
from moetune.models.moe import is_experts
from moetune.models.stack import decoder_layers, decoder_stack

VARLEN = "varlen"
"""The name under which `varlen_attention` is registered with transformers.

No mask function has this name, so transformers creates no mask.
"""

_ASKS_FOR_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether fewer key heads than query heads must be asked for, as from torch 2.13 on; 2.11 passes them to its kernel."""

Capability = tuple[int, int]


def attention_for(
    config: RunConfig,
    plain: PreTrainedModel,
    device: torch.device,
    capability: Capability | None,
) -> str:
    """Return the name of the attention function that a run's model is built with on `device`, which may be meta.
    `capability` is the CUDA compute capability of the GPU that the model runs on; None for a CPU."""
    if config.model.attention == "flash_attention_2" and device.type == "meta":
        return VARLEN  # stands for the flash_attn package, which has the same kernels and interface
    if config.model.attention != "sdpa" or capability is None or not config.packs:
        return config.model.attention
    return VARLEN if takes_cu_seqlens(plain, capability) else "sdpa"


def takes_cu_seqlens(plain: PreTrainedModel, capability: Capability) -> bool:
    """Return whether every layer can separate packed documents by `cu_seqlens`, with torch's kernel on a GPU of this
    compute capability.

    The kernel needs compute capability 8.0 or later and 16 bits. It supports no attention sinks, soft-capping, sparse
    attention or dropout, no heads larger than 256, and no heads that need more shared memory than the GPU has.
    """
    return (
        capability >= (8, 0)
        and plain.dtype in (torch.float16, torch.bfloat16)
        and has_flash_interface(plain)
        and (size := _largest_head(plain)) <= 256
        and not (has_little_shared_memory(capability) and 192 < size <= 224)
    )


_PROBE = "probe"
"""The name of an attention function, and a mask function, that only record what the model passes to them."""
_NO = 1 << 30
"""A head size that stands for "no kernel can be used"."""
_SINKS_AND_CAPS = ("s_aux", "softcap", "dropout", "indices")


def _largest_head(plain: PreTrainedModel) -> int:
    """Return the largest head size of a model, or `_NO` if an attention layer cannot use variable-length attention.

    Every attention layer must receive `cu_seqlens`, and the sliding window that its mask has, by keyword. To find out,
    a copy of the model runs on the meta device with attention and mask functions that record their arguments.
    """
    model = copy.deepcopy(plain).train()  # attention receives its dropout in training mode only
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
    except Exception:  # the model's code needs values, which meta tensors lack
        return _NO
    called = {module for module, _, _ in calls}
    all_fit = all(fits for _, _, fits in calls) and all(called & {*layer.modules()} for layer in ran)
    return max((size for _, size, _ in calls), default=_NO) if all_fit else _NO


_ROW = 8


def _window_of(mask_function: Any) -> int | None:
    """Return the sliding window of a causal mask, in tokens; 0 if it has none; None if the mask is of another kind."""
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
    """Return whether a GPU of this compute capability has 99 KiB of shared memory per block, as consumer GPUs do, and
    not 163 KiB or more."""
    return capability in ((8, 6), (8, 9), (12, 0), (12, 1))


# --- Offsets ------------------------------------------------------------------------------------------------------


def wants_cu_seqlens(model: PreTrainedModel) -> bool:
    """Return whether a model's attention separates packed documents by `cu_seqlens` and not by a mask."""
    return attention_name(model) in (VARLEN, "flash_attention_2")


def cu_seqlens(lengths: Sequence[int]) -> dict[str, Any]:
    """Return the keyword arguments by which attention separates documents that lie one after the other.

    `lengths` are the tokens of each document, row by row, and sum to T. `cu_seq_lens_q` and `cu_seq_lens_k` are the
    start of each document, and T: int32 [n + 1] on the CPU. `max_length_q` and `max_length_k` are the longest length,
    an int, so that the host need not wait for the device.
    """
    starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    longest = max(lengths)
    # Two tensors here too, because copying the batch to a device makes two.
    ends = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts.clone()}
    return ends | {"max_length_q": longest, "max_length_k": longest}


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
    """Compute causal attention within each document, with the signature of transformers' attention functions. Without
    `cu_seq_lens_q` it is transformers' scaled dot-product attention with `attention_mask`.

    Args:
        query: [B, h, S, d]; key [B, h_kv, S, d]; value [B, h_kv, S, d_v].
        scaling: factor of the scores; None for 1/√d.
        cu_seq_lens_q: starts of the documents, and T, int32 [n + 1], as from `cu_seqlens`.
        max_length_q: tokens of the longest document.
        sliding_window: number of last tokens, its own included, that a token attends to; None for all.

    Returns:
        The output [B, S, h, d_v], and None for the attention weights.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    assert max_length_q is not None
    rows, heads, length, size = query.shape
    size_v = value.shape[-1]
    scaling = size**-0.5 if scaling is None else scaling
    if size_v != size:  # the kernel needs values with the head size of queries and keys
        value = pad(value, (0, size - size_v))
    if missing := -size % 8:
        query, key, value = (pad(tensor, (0, missing)) for tensor in (query, key, value))
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    out = within_documents(q, k, v, cu_seq_lens_q, max_length_q, scaling, sliding_window or 0)
    return out.view(rows, length, heads, -1)[..., :size_v], None


def within_documents(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scaling: float, window: int
) -> Tensor:
    """Run torch's variable-length kernel, on CUDA only: each token attends to its own document up to itself.

    Arguments are those of `varlen_attention` in the kernel's layout: q [T, h, d], k and v [T, h_kv, d]; `starts` and
    `longest` are `cu_seq_lens_q` and `max_length_q`; a `window` of 0 is none. Returns [T, h, d].
    """
    options: dict[str, Any] = {"scale": scaling, "window_size": (window - 1, 0)}
    if _ASKS_FOR_GROUPS:
        options["enable_gqa"] = True
    kernel: Any = varlen_attn
    return kernel(q, k, v, starts, starts, longest, longest, **options)


AttentionInterface.register(VARLEN, varlen_attention)
