"""`moetune eval --predict` and `moetune generate --predict`: peak memory from a trace of their own forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from moetune.adapt.weights.published import finish_reading
from moetune.compat.torch import answering_no
from moetune.errors import UserError, counted
from moetune.inference.evaluate import ROWS
from moetune.inference.generate import has_static_cache, new_tokens, sampling, written_after
from moetune.inference.opened import Found
from moetune.memory.commands.forward import predict_forward
from moetune.memory.report import MemoryReport
from moetune.memory.trace.tracker import Tracker
from moetune.memory.trace.watched import Watched
from moetune.models.catalog.gpus import Gpu
from moetune.run.resolve import ResolvedRun
from moetune.training.step.batch import collate
from moetune.training.step.micro_step import held_out_loss

_LAST = 2
"""Tokens that a trace generates after the prompt, and again at the greatest length: the second is like all others."""


def predict_eval(found: Found, lengths: Sequence[int], *, gpu: str | Gpu | None = None) -> MemoryReport:
    """Predict the peak memory of evaluating a model on rows of these lengths, without weights or a GPU.

    `gpu` is as in `predict`; without one, and for a model that was found for a CPU, this machine's CPU is meant.

    Raises:
        UserError: the model is an adapter; or as `predict`.
    """
    batches = [tuple(lengths[at : at + ROWS]) for at in range(0, len(lengths), ROWS)]
    fullest = max(batches, key=lambda batch: (len(batch) * max(batch), batch))
    said = {"evaluates": found.name, "batch": f"{len(fullest)} × {max(fullest):,} tokens at most, forward alone"}
    return predict_forward(_run_of(found), Evaluating(fullest), said, gpu=gpu, filled=found.filled)


def lengths_of(rows: datasets.Dataset) -> list[int]:
    """Return the number of tokens of each row."""
    return [len(ids) for ids in rows.with_format("arrow")["input_ids"][:]] if len(rows) else []


@dataclass(frozen=True)
class Evaluating:
    """The forward pass of one batch of `evaluate`, with rows of these lengths."""

    lengths: tuple[int, ...]

    def __call__(self, watched: Watched, tracker: Tracker) -> None:
        model = watched.adapted.model
        tracker.enter("forward")
        ids = [np.zeros(length, np.int64) for length in self.lengths]
        batch = collate([{"input_ids": row, "labels": row} for row in ids], 0)
        held_out_loss(model, {name: tensor.to(model.device) for name, tensor in batch.items()})


def predict_generate(
    found: Found,
    prompt: int,
    most: int,
    temperature: float = 0.0,
    *,
    batch: int = 1,
    gpu: str | Gpu | None = None,
) -> MemoryReport:
    """Predict the peak memory of generating at most `most` tokens after each of `batch` prompts of at most `prompt`
    tokens, keys and values of all of them included. `gpu` is as in `predict_eval`.

    Raises:
        UserError: the prompt takes all positions of the model; or as `predict_eval`.
    """
    if (new := new_tokens(found.settings, prompt, most)) < 1:
        raise UserError(f"a prompt of {prompt:,} tokens leaves no position of {found.name!r} for another token")
    said = {"generates": f"{new:,} tokens after a prompt of {prompt:,}", "batch": counted(batch, "text")}
    return predict_forward(
        _run_of(found), Generating(prompt, new, temperature, batch, found.name), said, gpu=gpu, filled=found.filled
    )


class _Enough(Exception):
    """Ends a generation whose further tokens would be like those before."""


@dataclass(frozen=True)
class Generating:
    """The forward passes of `generate`: over the prompts, for a second token, and for the last token.

    A static cache has keys and values of all tokens from the beginning. One that grows is given those of the tokens
    between, instead of computing them one by one.
    """

    prompt: int
    new_tokens: int
    temperature: float = 0.0
    batch: int = 1
    name: str = ""

    def __call__(self, watched: Watched, tracker: Tracker) -> None:
        model: Any = watched.adapted.model
        if (folder := watched.adapted.run.model.source.local_folder()) is not None:
            finish_reading(model, folder)
        model.generation_config = sampling(self.name, model.generation_config)
        tracker.enter("forward")
        if has_static_cache(model.config):
            filling = model.register_forward_pre_hook(self._fill_windows, with_kwargs=True)
            self._go_on(model, self.prompt, self.new_tokens)
            filling.remove()
            return
        cache = DynamicCache(config=model.config)
        growing: dict[str, Any] = {"past_key_values": cache, "cache_implementation": None}
        self._go_on(model, self.prompt, _LAST + 1, **growing)
        if (between := self.new_tokens - _LAST) > 0:
            tracker.step = 1
            self._lengthen(cache, self.prompt + between)
            self._go_on(model, self.prompt + between + 1, _LAST + 1, **growing)

    def _go_on(self, model: Any, length: int, most: int, **more: Any) -> None:
        """Generate up to `_LAST` of `most` tokens after `length` tokens, of which a cache in `more` may hold all but
        the last."""
        left = min(_LAST, self.new_tokens)

        def count(_: Tensor, logits: Tensor) -> Tensor:
            nonlocal left
            left -= 1
            if not left:
                raise _Enough
            return logits

        ids = torch.zeros(self.batch, length, dtype=torch.int64, device=model.device)
        with answering_no(), suppress(_Enough):
            written_after(model, ids, ids + 1, most, self.temperature, ends=0, pad=0, logits_processor=[count], **more)

    def _fill_windows(self, _: Any, __: Any, given: dict[str, Any]) -> None:
        """Before a pass for a further token, mark the windows as full that the last token finds full."""
        for layer in given["past_key_values"].layers:
            state: Any = layer
            if getattr(state, "cumulative_length_int", 0) and state.max_cache_len < self.prompt + self.new_tokens - 1:
                state.cumulative_length_int = max(state.cumulative_length_int, state.max_cache_len)

    def _lengthen(self, cache: DynamicCache, length: int) -> None:
        """Put keys and values of `length` tokens into the cache, or of as many as a layer's window keeps."""
        for layer in cache.layers:
            state: Any = layer
            if getattr(state, "keys", None) is None:
                continue
            kept = length
            if (window := getattr(state, "sliding_window", None)) is not None:
                kept, state.cumulative_length = min(length, window - 1), length
            for name in ("keys", "values"):
                old: Tensor = getattr(state, name)
                setattr(state, name, old.new_empty((*old.shape[:-2], kept, old.shape[-1])))


def _run_of(found: Found) -> ResolvedRun:
    if found.run is None:
        raise UserError(
            f"{found.name!r} is an adapter, whose model transformers and PEFT build: it cannot be predicted; the run "
            "that made it can, and a merged export"
        )
    return found.run
