"""`generate_ends`: passes of transformers' `generate` for its first and last tokens."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from moetune.compat.transformers import CACHE
from moetune.memory.trace.tracker import Tracker
from moetune.memory.trace.watched import Watched

Generate = Callable[..., Any]
"""Generates tokens after token ids [B, S]: (ids, further arguments of transformers' `generate`) -> any result."""
Cache = Literal["grows", "static", "none"]
"""The cache of keys and values: tensors that grow with each token, tensors that have room for all tokens from the
beginning, or none, so that each token computes all of them anew."""
_LAST = 2
"""Tokens that are generated after the prompt, and again at the greatest length: the second is like all others."""


class _Enough(Exception):
    """Ends a generation whose further tokens would be like those before."""


def generate_ends(
    watched: Watched, tracker: Tracker, generate: Generate, ids: Tensor, most: int, cache: Cache = "grows"
) -> None:
    """Generate the first two of `most` tokens after prompts, and the last two: those between take less memory.

    A cache that grows is extended by the tokens between without computing them. With a static cache, which has its full
    size from the beginning, only the first two run.

    Args:
        watched: the model.
        tracker: records the passes; it must be active.
        generate: calls the model's `generate`; it makes a static cache itself.
        ids: token ids of the prompts, [B, S].
        most: number of tokens to generate after each prompt.
        cache: the kind of cache that `generate` uses.
    """
    model: Any = watched.adapted.model
    prompt = ids.shape[1]
    first = min(_LAST, most)
    if cache == "static":
        filling = model.register_forward_pre_hook(_Filling(prompt + most), with_kwargs=True)
        _generate(generate, ids, first, max_new_tokens=most)
        filling.remove()
        return
    kept = DynamicCache(config=model.config) if cache == "grows" else None
    more = {} if kept is None else {CACHE: kept}
    _generate(generate, ids, first, **more, max_new_tokens=most)
    if (last := min(_LAST, most - first)) > 0:
        if kept is not None:
            _lengthen(kept, prompt + most - 1 - last, tracker)
        written = ids.new_zeros((len(ids), prompt + most - last))
        _generate(generate, written, last, **more, max_new_tokens=last + 1)


def _generate(generate: Generate, ids: Tensor, tokens: int, **more: Any) -> None:
    """Generate `tokens` tokens after `ids`. `more` are arguments for `generate`, such as a cache of all `ids` but the
    last."""
    left = tokens

    def is_enough(ids: Tensor, *_: Any, **__: Any) -> Tensor:
        nonlocal left
        left -= 1
        if not left:
            raise _Enough
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    with suppress(_Enough):
        generate(ids, stopping_criteria=[is_enough], **more)


class _Filling:
    """Forward pre-hook that marks sliding windows in a static cache as full if they are full at the last of `length`
    tokens, so that passes after the first take as much memory as the last one does."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, _: Any, __: Any, given: dict[str, Any]) -> None:
        for layer in given[CACHE].layers:
            state: Any = layer
            if getattr(state, "cumulative_length_int", 0) and state.max_cache_len < self.length - 1:
                state.cumulative_length_int = max(state.cumulative_length_int, state.max_cache_len)


def _lengthen(cache: DynamicCache, length: int, tracker: Tracker) -> None:
    """Replace the keys and values in a cache by uninitialized ones of `length` tokens, or of as many as the layer's
    window keeps, and record these."""
    for number, layer in enumerate(cache.layers):
        state: Any = layer
        if getattr(state, "keys", None) is None:
            continue
        kept = length
        if (window := getattr(state, "sliding_window", None)) is not None:
            kept, state.cumulative_length = min(length, window - 1), length
        for name in ("keys", "values"):
            old: Tensor = getattr(state, name)
            new = old.new_empty((*old.shape[:-2], kept, old.shape[-1]))
            tracker.add(new)
            tracker.belongs(new, number)
            setattr(state, name, new)
