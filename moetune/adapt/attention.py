"""Choice of a model's attention function; packed documents by variable-length attention, without a mask.

With `model.attention: sdpa`, packed documents share a row, and scaled dot-product attention separates them by a mask
[B, 1, S, S]. On a GPU, torch's flash attention (`torch.nn.attention.varlen`) computes the same values from the offsets
of the documents (`cu_seqlens`), so `sdpa` selects it where it can be used. The offsets are part of the batch, under the
names of transformers' FlashAttentionKwargs, and reach each layer's attention function as keyword arguments.

For models with attention sinks (gpt-oss and its like) transformers has eager attention only. Here they have the
variable-length attention for packed documents (flash.py); and `sdpa_with_sink` for unpacked rows, text generation, and
masks that no window describes. Their mask, and that of some hybrids (Granite 4), does not separate documents: on a CPU,
which has no variable-length attention, `masked_by_documents` makes one of the same offsets.

Shapes: B rows of S tokens, T = B·S tokens; h heads of queries, h_kv heads of keys and values; head size d of queries
and keys, d_v of values; n documents.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from moetune.adapt.documents import (
    DOCUMENT_LENGTHS,
    document_lengths,
    is_split_by_documents,
    layers_with_state,
    split_by_documents,
)
from moetune.adapt.flash import within_documents
from moetune.compat.transformers import (
    CACHE,
    attention_name,
    fix_rotary_length,
    has_flash_interface,
    has_sinks,
    set_attention,
    without_packages,
)
from moetune.config.schema import RunConfig
from moetune.models.dry_run import shortened
from moetune.models.stack import decoder_layers, decoder_stack

VARLEN = "varlen"
"""The name under which `varlen_attention` is registered with transformers, with CUDA's kernel.

No mask function has this name, so transformers creates no mask.
"""
BY_DOCUMENTS = "masked_by_documents"
"""The name of `masked_by_documents`, for models with sinks and hybrids on a CPU; no mask function has it either."""
MASKED_SINKS = "sdpa_with_sink"
"""The name of `sdpa_with_sink`, for which transformers makes the mask that it makes for eager attention."""

_STARTS = "cu_seq_lens_q"
Capability = tuple[int, int]


def attention_for(
    config: RunConfig,
    plain: PreTrainedModel,
    device: torch.device,
    capability: Capability | None,
) -> str:
    """Return the name, as registered with transformers, of the attention function that a run's model is built with.

    Args:
        plain: the model as transformers builds it, on the meta device.
        device: where the model is built; on meta, `flash_attention_2` becomes `varlen`, which needs no package.
        capability: CUDA compute capability of the GPU that the model runs on; None for a CPU.
    """
    wanted = config.model.attention
    if wanted == "flash_attention_2" and device.type == "meta":
        return VARLEN  # stands for the flash_attn package, which has the same kernels and interface
    if wanted != "sdpa":
        return wanted
    by_mask = _by_mask(plain)
    on_cpu = capability is None
    if not config.packs or (on_cpu and by_mask == "sdpa" and not layers_with_state(plain)):
        return by_mask
    if not takes_cu_seqlens(plain, capability):
        return by_mask
    return BY_DOCUMENTS if on_cpu else VARLEN


def is_varlen(model: PreTrainedModel) -> bool:
    """Return whether a model's attention function is `varlen_attention`."""
    return attention_name(model) == VARLEN


def give_way_to_masks(model: PreTrainedModel) -> None:
    """Make a model that separates documents by offsets change to transformers' mask as soon as a forward pass needs it,
    and find the offsets in `position_ids` where only these are given, as other trainers do.

    A mask is needed in a pass with keys of earlier tokens (text generation), or with rows that are padded on their
    left. The change is for good. Rows that are padded on the right need no mask: no token attends to what follows it.
    """
    if attention_name(model) in (VARLEN, BY_DOCUMENTS) or _is_split(model):
        hook = partial(_give_way, model=model, by_mask=_by_mask(model))
        decoder_stack(model).register_forward_pre_hook(hook, with_kwargs=True)


def _give_way(stack: Any, args: Any, given: dict[str, Any], *, model: PreTrainedModel, by_mask: str) -> Any:
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    is_padded = isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask[:, 0] == 0).any())
    if is_padded or given.get("use_cache") or given.get(CACHE) is not None:
        if attention_name(model) in (VARLEN, BY_DOCUMENTS):
            set_attention(stack.config, by_mask)
    elif mask is None and positions is not None and (DOCUMENT_LENGTHS if _is_split(model) else _STARTS) not in given:
        if positions.dim() == 3:  # one of text, and those of images
            positions = positions[0]
        starts = positions.diff(dim=-1, prepend=positions[:, :1]) != 1
        ends = [*starts.flatten().nonzero().flatten().tolist(), starts.numel()]
        inputs = document_inputs(model)([end - start for start, end in pairwise(ends)])
        on_device = {name: x.to(positions.device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        return args, given | on_device
    return None


def _is_split(model: PreTrainedModel) -> bool:
    return any(map(is_split_by_documents, decoder_layers(model).values()))


def _by_mask(model: PreTrainedModel) -> str:
    return MASKED_SINKS if has_sinks(model) else "sdpa"


_IN_WORDS = {
    "sdpa": "scaled dot product (sdpa)",
    VARLEN: "flash, by documents",
    BY_DOCUMENTS: "scaled dot product with a mask (sdpa)",
    MASKED_SINKS: "scaled dot product with a mask (sdpa)",
    "eager": "eager, with matrices of sequence_length²",
    "flash_attention_2": "flash_attention_2",
}


def attention_in_words(config: RunConfig, plain: PreTrainedModel, capability: Capability | None) -> str:
    """Describe the attention that a run's model is built with, as text for reports; arguments as in `attention_for`."""
    wanted = config.model.attention
    name = wanted if wanted == "flash_attention_2" else attention_for(config, plain, torch.device("meta"), capability)
    return _IN_WORDS[name] + ", with sinks" * has_sinks(plain)


def takes_cu_seqlens(plain: PreTrainedModel, capability: Capability | None) -> bool:
    """Return whether a model can run packed documents by variable-length attention, which needs no mask.

    For that, every layer must separate documents by `cu_seqlens`, their cumulative lengths, and torch must have a
    kernel: on a GPU of compute capability `capability`, or on a CPU if it is None. CUDA's needs compute capability 8.0
    or later and 16 bits. It supports no soft-capping, sparse attention or dropout, no heads larger than 256, and no
    heads that need more shared memory than the GPU has. `plain` is the model on the meta device; for one that does not
    declare support of flash attention the answer is False.
    """
    size = _NO
    if has_flash_interface(plain):
        key = type(plain), plain.config.to_json_string(use_diff=False)
        if key not in _LARGEST_HEADS:
            _LARGEST_HEADS[key] = _largest_head(plain)
        size = _LARGEST_HEADS[key]
    if capability is None:
        return size < _NO
    return (
        capability >= (8, 0)
        and plain.dtype in (torch.float16, torch.bfloat16)
        and size <= 256
        and not (has_little_shared_memory(capability) and 192 < size <= 224)
    )


_PROBE = "probe"
"""The name of an attention function, and a mask function, that only record what the model passes to them."""
_NO = 1 << 30
"""A head size that stands for "no kernel can be used"."""
_UNSUPPORTED = ("softcap", "dropout", "indices")
_LARGEST_HEADS: dict[tuple[type[PreTrainedModel], str], int] = {}
"""(class of a model, its configuration as JSON) -> what `_largest_head` found. Shortened models are built often."""


def _largest_head(plain: PreTrainedModel) -> int:
    """Return the largest head size of a model; `_NO`, which exceeds every size, if a layer rules out the kernels.

    Every attention layer must receive `cu_seqlens`, and the sliding window that its mask has, by keyword. To find out,
    a copy of the model, with one of identical layers, runs on the meta device with attention and mask functions that
    record their arguments. A layer without attention must be one that runs document by document (documents.py).
    """
    model = shortened(plain)
    model.train()  # attention receives its dropout in training mode only
    split_by_documents(model)
    calls: list[tuple[nn.Module, int, bool]] = []

    def mask(*args: Any, mask_function: Any, **kwargs: Any) -> Any:
        empty: Any = torch.empty(1, 1, _ROW, _ROW, device="meta", dtype=torch.bool)
        empty.window = _window_of(mask_function)
        return empty

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, given: Any, **passed: Any) -> Any:
        window = getattr(given, "window", None)
        fits = _STARTS in passed and window is not None and window == (passed.get("sliding_window") or 0)
        calls.append((module, query.shape[-1], fits and not any(passed.get(name) for name in _UNSUPPORTED)))
        return value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register(_PROBE, attention)
    AttentionMaskInterface.register(_PROBE, mask)
    for module in model.modules():
        fix_rotary_length(module)
        if isinstance(getattr(module, "config", None), PretrainedConfig):
            set_attention(module.config, _PROBE)
    ran: list[nn.Module] = []
    for layer in decoder_layers(model).values():
        layer.register_forward_hook(lambda layer, args, output: ran.append(layer))
    ids = torch.zeros(1, _ROW, dtype=torch.long, device="meta")
    try:
        with torch.no_grad(), without_packages(model):
            decoder_stack(model)(
                input_ids=ids,
                attention_mask=torch.ones(1, _ROW, dtype=torch.long),  # not on meta: read where a layer has a state
                use_cache=False,
                **cu_seqlens([_ROW]),
                **document_lengths([_ROW]),
            )
    except Exception:  # the model's code needs values, which meta tensors lack
        return _NO
    called = {module for module, _, _ in calls}
    attends = (bool(called & {*layer.modules()}) or is_split_by_documents(layer) for layer in ran)
    all_fit = all(fits for _, _, fits in calls) and all(attends)
    return max((size for _, size, _ in calls), default=_NO) if all_fit else _NO


_ROW = 8


_DENSE = 1 << 16
"""Longest sliding window, in tokens, that `_window_of` finds; a model with a longer one uses a mask."""


def _window_of(mask_function: Any) -> int | None:
    """Return the sliding window of a causal mask, in tokens; 0 if it has none; None if the mask is of another kind.

    `mask_function` is transformers': (batch, head, query, key indices) -> whether the query sees the key. It is
    evaluated for the last of 2^22 tokens: at every distance below `_DENSE` tokens, then at every 1024th.
    """
    last = (1 << 22) - 1
    at = last - torch.cat([torch.arange(_DENSE), torch.arange(_DENSE, last + 1, 1024)])
    seen = torch.as_tensor(mask_function(torch.tensor(0), torch.tensor(0), torch.tensor(last), at)).expand(len(at))
    window = int(seen.sum())
    is_causal = not torch.as_tensor(mask_function(torch.tensor(0), torch.tensor(0), torch.tensor(3), torch.tensor(4)))
    if not is_causal or not seen[:window].all() or _DENSE < window < len(at):
        return None
    return 0 if window == len(at) else window


def has_little_shared_memory(capability: Capability) -> bool:
    """Return whether a GPU of this compute capability has only 99 KiB of shared memory per block, as consumer GPUs."""
    return capability in ((8, 6), (8, 9), (12, 0), (12, 1))


# --- Offsets ------------------------------------------------------------------------------------------------------


def wants_cu_seqlens(model: PreTrainedModel) -> bool:
    """Return whether a model's attention separates packed documents by `cu_seqlens` and not by transformers' mask."""
    return attention_name(model) in (VARLEN, BY_DOCUMENTS, "flash_attention_2")


def document_inputs(model: PreTrainedModel) -> Callable[[Sequence[int]], dict[str, Any]]:
    """Return a function that takes the lengths of a batch's documents, in tokens, and returns inputs of the model.

    These are the keyword arguments by which the model keeps the documents apart; {} for a model that does so by a mask
    alone, which transformers makes from `position_ids`.
    """
    by_offsets, by_lengths = wants_cu_seqlens(model), _is_split(model)

    def inputs(lengths: Sequence[int]) -> dict[str, Any]:
        return (cu_seqlens(lengths) if by_offsets else {}) | (document_lengths(lengths) if by_lengths else {})

    return inputs


def cu_seqlens(lengths: Sequence[int]) -> dict[str, Any]:
    """Return the keyword arguments by which attention separates documents that lie one after the other.

    `lengths` are the tokens of each document, row by row, and sum to T. `cu_seq_lens_q` and `cu_seq_lens_k` are the
    start of each document, and T: int32 [n + 1] on the CPU. `max_length_q` and `max_length_k` are the longest length,
    an int, so that the host need not wait for the device.
    """
    starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    longest = max(lengths)
    # Two tensors here too, because copying the batch to a device makes two.
    ends = {_STARTS: starts, "cu_seq_lens_k": starts.clone()}
    return ends | {"max_length_q": longest, "max_length_k": longest}


# --- The attention functions --------------------------------------------------------------------------------------


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
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each document, with the signature of transformers' attention functions.

    Without `cu_seq_lens_q` each row is one document. `attention_mask` is not used. The kernel runs within the context
    of the module's attribute `around_kernel`, a function without arguments, if it has one.

    Args:
        query: [B, h, S, d]; key [B, h_kv, S, d]; value [B, h_kv, S, d_v].
        scaling: factor of the scores; None for 1/√d.
        cu_seq_lens_q: starts of the documents, and T, int32 [n + 1], as from `cu_seqlens`.
        max_length_q: tokens of the longest document.
        sliding_window: number of last tokens, its own included, that a token attends to; None for all.
        s_aux: scores of the sinks [h]; None for attention without sinks.

    Returns:
        The output [B, S, h, d_v], and None for the attention weights.
    """
    rows, heads, length, size = query.shape
    if cu_seq_lens_q is None:
        assert key.shape[2] == length, "variable-length attention has no cache of keys"
        cu_seq_lens_q = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=query.device)
        max_length_q = length
    assert max_length_q is not None
    size_v = value.shape[-1]
    scaling = size**-0.5 if scaling is None else scaling
    if size_v != size:  # the kernel needs values with the head size of queries and keys
        value = pad(value, (0, size - size_v))
    if missing := -size % 8:
        query, key, value = (pad(tensor, (0, missing)) for tensor in (query, key, value))
    # The output has the layout of q: one that is not contiguous is copied again by the layer, and both are saved.
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in (query, key, value))
    with module.__dict__.get("around_kernel", nullcontext)():
        out = within_documents(q, k, v, s_aux, cu_seq_lens_q, max_length_q, scaling, sliding_window or 0)
    return out.view(rows, length, heads, -1)[..., :size_v], None


def masked_by_documents(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute what `varlen_attention` does, by a mask [B, 1, S, S]; arguments and result are the same."""
    rows, _, length, size = query.shape
    tokens = torch.arange(rows * length, device=query.device).view(rows, 1, 1, length)
    ago = tokens.mT - tokens
    is_seen = (ago >= 0) & (ago < (sliding_window or length))
    if cu_seq_lens_q is not None:
        document = torch.bucketize(tokens, cu_seq_lens_q, right=True)
        is_seen &= document.mT == document
    mask = torch.zeros_like(ago, dtype=query.dtype).masked_fill_(~is_seen, torch.finfo(query.dtype).min)
    return sdpa_with_sink(module, query, key, value, mask, size**-0.5 if scaling is None else scaling, s_aux)


_MORE_KEYS = 256
"""Number of keys that `sdpa_with_sink` adds; all but one are masked. Kernels want lengths that are multiples of 8."""


def sdpa_with_sink(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention with sinks and any mask, with the signature of transformers' attention functions.

    The sink is one more key, whose value is zero, and whose score must be s for every query. So queries and keys get 8
    more columns, of which three are used: the new key is 1 there, other keys are 0, and the three entries of each query
    add up to s / scaling. One 16-bit entry would be too coarse.

    Args:
        query: [B, h, S, d]; key [B, h_kv, S_k, d]; value [B, h_kv, S_k, d_v].
        attention_mask: added to the scores, [B, 1, S, S_k].
        scaling: factor of the scores.
        s_aux: scores of the sinks [h]; None for attention without sinks.
        indices: indices [B, S, K] of the keys that each query may attend to, besides the mask; None for all.

    Returns:
        The output [B, S, h, d_v], and None for the attention weights.
    """
    mask = attention_mask
    if indices is not None:
        hidden = torch.ones_like(mask, dtype=torch.bool).scatter_(-1, indices.long()[:, None], False)
        mask = mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
    if s_aux is not None:
        rest, parts = s_aux.to(torch.promote_types(s_aux.dtype, torch.float32)) / scaling, []
        for _ in range(3):
            parts.append(rest.to(query.dtype))
            rest = (rest - parts[-1]).detach()
        score = pad(torch.stack(parts, -1), (0, 5))[None, :, None]  # [1, h, 1, 8]
        query = torch.cat([query, score.expand(*query.shape[:3], 8)], -1)
        length, size = key.shape[2:]
        key, value = pad(key, (0, 8, 0, _MORE_KEYS)), pad(value, (0, 0, 0, _MORE_KEYS))
        key[:, :, length, size : size + 3] = 1
        mask = pad(mask, (0, _MORE_KEYS), value=torch.finfo(mask.dtype).min)
        mask[..., length] = 0
    return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)


AttentionInterface.register(VARLEN, varlen_attention)
AttentionInterface.register(BY_DOCUMENTS, masked_by_documents)
AttentionInterface.register(MASKED_SINKS, sdpa_with_sink)
AttentionMaskInterface.register(MASKED_SINKS, eager_mask)
