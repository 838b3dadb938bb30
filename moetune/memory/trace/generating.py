"""`generate_ends`: the passes of transformers' `generate` for its first and last tokens, on fake or real tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from moetune.memory.trace.tracker import Tracker
from moetune.memory.trace.watched import Watched

Generate = Callable[..., Any]
"""(ids, more arguments of transformers' `generate`) -> anything; generates tokens after token ids [B, S]."""
Cache = Literal["grows", "static", "none"]
"""What becomes of keys and values: they are kept in tensors that grow with each token, or in tensors for all tokens, or
are computed anew for each."""
_LAST = 2
"""Tokens that are generated after the prompt, and again at the greatest length: the second is like all others."""


class _Enough(Exception):
    """Ends a generation whose further tokens would be like those before."""


def generate_ends(
    watched: Watched, tracker: Tracker, generate: Generate, ids: Tensor, most: int, cache: Cache = "grows"
) -> None:
    """Generate the first two of `most` tokens after prompts, and the last two: those between take less memory.

    A static cache has keys and values of all tokens from the beginning. One that grows is given those of the tokens
    between, instead of computing them one by one.

    Args:
        watched: the model, whose `generate` is called.
        tracker: records the passes; it must be active.
        ids: token ids of the prompts, [B, S].
        cache: what becomes of keys and values; `generate` makes a static cache itself.
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
    more = {} if kept is None else {"past_key_values": kept}
    _generate(generate, ids, first, **more, max_new_tokens=most)
    if (last := min(_LAST, most - first)) > 0:
        if kept is not None:
            _lengthen(kept, prompt + most - 1 - last, tracker)
        written = ids.new_zeros((len(ids), prompt + most - last))
        _generate(generate, written, last, **more, max_new_tokens=last + 1)


def _generate(generate: Generate, ids: Tensor, tokens: int, **more: Any) -> None:
    """Generate `tokens` tokens after `ids`; a cache in `more` may hold all of them but the last."""
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
    """A hook before a pass for a further token: marks the windows of a static cache as full that the last of `length`
    tokens finds full."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, _: Any, __: Any, given: dict[str, Any]) -> None:
        for layer in given["past_key_values"].layers:
            state: Any = layer
            if getattr(state, "cumulative_length_int", 0) and state.max_cache_len < self.length - 1:
                state.cumulative_length_int = max(state.cumulative_length_int, state.max_cache_len)


def _lengthen(cache: DynamicCache, length: int, tracker: Tracker) -> None:
    """Put keys and values of `length` tokens into a cache, or of as many as a layer's window keeps."""
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
