"""`--predict` of `moetune eval` and `generate`: peak memory of their forward passes."""

from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from moetune.adapt.weights.published import finish_reading
from moetune.compat.fake_mode import answering_no
from moetune.errors import UserError, counted
from moetune.inference.evaluate import ROWS
from moetune.inference.generate import has_static_cache, new_tokens, sampling, written_after
from moetune.inference.opened import Opened
from moetune.memory.commands.forward import predict_forward
from moetune.memory.report import MemoryReport
from moetune.memory.trace.generating import generate_ends
from moetune.memory.trace.tracker import Tracker
from moetune.memory.trace.watched import Watched
from moetune.models.catalog.gpus import Gpu
from moetune.run.resolve import ResolvedRun
from moetune.training.step.batch import collate
from moetune.training.step.micro_step import held_out_loss


def predict_eval(opened: Opened, lengths: Sequence[int], *, gpu: str | Gpu | None = None) -> MemoryReport:
    """Predict the peak memory of evaluating a model on rows of these lengths, in tokens, without weights or a GPU.

    Args:
        opened: the model, found for a GPU or for this machine's CPU.
        lengths: in the order in which the rows are evaluated.
        gpu: a GPU's name, a size such as `44GiB`, or a catalog entry; without one, the report for a GPU has no verdict.

    Raises:
        UserError: the model is an adapter, or the pass cannot be predicted.
    """
    batches = [tuple(lengths[at : at + ROWS]) for at in range(0, len(lengths), ROWS)]
    fullest = max(batches, key=lambda batch: (len(batch) * max(batch), batch))
    said = {"evaluates": opened.name, "batch": f"{len(fullest)} × {max(fullest):,} tokens at most, forward alone"}

    def evaluate(watched: Watched, tracker: Tracker) -> None:
        model = watched.adapted.model
        tracker.enter("forward")
        ids = [np.zeros(length, np.int64) for length in fullest]
        batch = collate([{"input_ids": row, "labels": row} for row in ids], 0)
        held_out_loss(model, {name: tensor.to(model.device) for name, tensor in batch.items()})

    return predict_forward(_run_of(opened), evaluate, said, gpu=gpu, filled=opened.filled)


def lengths_of(rows: datasets.Dataset) -> list[int]:
    """Return the number of tokens of each row."""
    return [len(ids) for ids in rows.with_format("arrow")["input_ids"][:]] if len(rows) else []


def predict_generate(
    opened: Opened,
    prompt: int,
    most: int,
    temperature: float = 0.0,
    *,
    batch: int = 1,
    gpu: str | Gpu | None = None,
) -> MemoryReport:
    """Predict the peak memory of generating text after prompts, keys and values of all tokens included.

    Args:
        opened: the model, found for a GPU or for this machine's CPU.
        prompt: the number of tokens of the longest prompt.
        most: the largest number of tokens to generate after each prompt.
        temperature: 0 for the most likely tokens; above 0, sampling takes some memory.
        batch: the number of prompts, which are continued together.
        gpu: a GPU's name, a size such as `44GiB`, or a catalog entry; without one, the report for a GPU has no verdict.

    Raises:
        UserError: the prompt takes all positions of the model, the model is an adapter, or it cannot be predicted.
    """
    if (new := new_tokens(opened.settings, prompt, most)) < 1:
        raise UserError(f"a prompt of {prompt:,} tokens leaves no position of {opened.name!r} for another token")
    said = {"generates": f"{new:,} tokens after a prompt of {prompt:,}", "batch": counted(batch, "text")}

    def generate(watched: Watched, tracker: Tracker) -> None:
        model: Any = watched.adapted.model
        if (folder := watched.adapted.run.model.source.local_folder()) is not None:
            finish_reading(model, folder)
        model.generation_config = sampling(opened.name, model.generation_config)
        model.generation_config.stop_strings = None  # they are looked for in values
        tracker.enter("forward")
        is_static = has_static_cache(model.config)

        def write(ids: Tensor, *, max_new_tokens: int, **overrides: Any) -> None:
            overrides |= {} if is_static else {"cache_implementation": None}
            written_after(model, ids, torch.ones_like(ids), max_new_tokens, temperature, ends=0, pad=0, **overrides)

        ids = torch.zeros(batch, prompt, dtype=torch.int64, device=model.device)
        with answering_no():
            generate_ends(watched, tracker, write, ids, new, "static" if is_static else "grows")

    return predict_forward(_run_of(opened), generate, said, gpu=gpu, filled=opened.filled)


def _run_of(opened: Opened) -> ResolvedRun:
    """Return the run whose model was found; raise `UserError` for a model that only other libraries build."""
    if opened.run is None:
        raise UserError(
            f"{opened.name!r} is an adapter, whose model transformers and PEFT build: it cannot be predicted; the run "
            "that made it can, and a merged export"
        )
    return opened.run
