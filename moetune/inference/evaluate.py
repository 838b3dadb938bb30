"""`moetune eval`: held-out loss and perplexity of a run, an adapter or a checkpoint."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import PreTrainedModel

from moetune.config.schema import DataConfig, RunConfig, TrainConfig, data_sets, path_and_split
from moetune.errors import UserError, note
from moetune.files import expanded
from moetune.inference.opened import Opened, open_model
from moetune.json_files import Answer
from moetune.training.data.load import load_data, pad_token_id, refuse_unknown_tokens
from moetune.training.step.batch import Row, collate
from moetune.training.step.micro_step import held_out_loss

ROWS = 4
"""Rows that are evaluated in one batch."""
_MOST_LOSS = 700.0  # nats; exp of a larger loss overflows a float


@dataclass(frozen=True)
class Evaluation(Answer):
    """The loss of a model on a data set: mean cross-entropy over the predicted tokens, in nats.

    Attributes:
        model: the name or path that was opened.
        kind: what it is: `run`, `adapter`, `checkpoint`, or `packed` for a quantized checkpoint.
        data: the data set's file or name.
        records: the number of sequences, one for each record.
        tokens: the number of predicted tokens.
        step: the step of a run's checkpoint; None for other models.
        held_out: True if the run held the data out, False if it trained on them, None if neither is known.
        date: the date that the chat template wrote (YYYY-MM-DD); None if it writes none.
    """

    model: str
    kind: str
    data: str
    records: int
    tokens: int
    loss: float
    step: int | None = None
    held_out: bool | None = None
    date: str | None = None

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss)

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "perplexity": self.perplexity}


def evaluate(
    opened: Opened | Path | str, data: str | None = None, sequence_length: int | None = None, format: str | None = None
) -> Evaluation:
    """Compute the mean loss of a model on a data set, with each record in a sequence of its own.

    Args:
        opened: an opened model; or what `open_model` opens.
        data: a file or name as under `data.train`; by default the run's held-out data.
        sequence_length: the largest number of tokens of a record; by default the run's, or the default of run files.
        format: the value of `data.format`; by default the run's, or `auto`.

    Raises:
        UserError: the model cannot be opened; there are no data, or they cannot be read; or the loss is not finite, or
            too large for a perplexity.
    """
    opened = opened if isinstance(opened, Opened) else open_model(str(opened))
    rows, name = rows_of(opened, data, sequence_length, format)
    return evaluated(opened, rows, name, data)


def evaluated(opened: Opened, rows: datasets.Dataset, name: str, data: str | None) -> Evaluation:
    """Compute the mean loss of a model on rows that were read by `rows_of`, whose argument was `data`.

    `name` is the data set's name, as `rows_of` returned it. Raises `UserError` if the loss is not finite, or too large
    for a perplexity.
    """
    loss, tokens = mean_loss(opened.model, rows, pad_token_id(opened.tokenizer))
    if not loss < _MOST_LOSS:
        raise UserError(f"the loss of {opened.name!r} is {loss}: check its weights and config.json")
    return Evaluation(
        opened.name,
        opened.kind,
        name,
        len(rows),
        tokens,
        loss,
        opened.step,
        _is_held_out(opened.config, data),
        None if opened.clock is None else f"{opened.clock:%Y-%m-%d}",
    )


def _is_held_out(config: RunConfig | None, data: str | None) -> bool | None:
    """Return False if the run trained on `data`, True if it held them out, None if neither is known.

    `data` None stands for the held-out data of the run; `config` is None for a model that is no run.
    """
    if data is None:
        return True
    given = None if config is None else config.data
    if given is None:
        return None

    def location(spec: str, split: str) -> tuple[Path, str]:
        name, after = path_and_split(spec)
        path = expanded(name).resolve()
        return path, after or ("" if path.is_file() else split)

    asked = location(data, "train")
    trained = asked in {location(name, "train") for name, _ in data_sets(given.train, given.split)}
    held_out = asked in {location(name, "held out") for name, _ in data_sets(given.eval)}
    return False if trained else True if held_out else None


def rows_of(
    opened: Opened, data: str | None = None, sequence_length: int | None = None, format: str | None = None
) -> tuple[datasets.Dataset, str]:
    """Return the rows on which `evaluate`, given the same arguments, computes the loss, and the name of the data set.

    By default, rows, length and format are those of the run's held-out data.

    Raises:
        UserError: there are no held-out data, the data cannot be read, or have tokens that the model does not have.
    """
    config = opened.config
    train = TrainConfig() if config is None else config.train
    if sequence_length is not None:
        train = train.but(sequence_length=sequence_length)
    given = None if config is None else config.data
    settings = DataConfig(train="none") if given is None else given
    settings = settings.but(
        packing=False, chat_template=None, template={}
    )  # the opened tokenizer already has the template
    if format is not None:
        settings = DataConfig.model_validate(settings.model_dump() | {"format": format})
    if data is not None:
        settings = settings.but(train=data, split=None, eval=None, validation=None)
    elif given is None or not given.evaluates:
        raise UserError(f"{opened.name!r} has no held-out data of its own; name some with --data")
    read = load_data(settings, opened.tokenizer, train, length_from="--sequence-length")
    rows, counts = (read.eval, read.eval_counts) if data is None else (read.train, read.counts)
    assert rows is not None
    assert counts is not None
    note(*counts.unread)
    if counts.dropped or counts.cut:
        note(f"{counts.dropped:,} records were left out and {counts.cut:,} cut, as data.too_long of the run says")
    refuse_unknown_tokens(opened.settings, opened.name, pad_token_id(opened.tokenizer), rows)
    return rows, data or "what the run held out"


@torch.no_grad()
def mean_loss(model: PreTrainedModel, rows: Iterable[Row], pad_token_id: int) -> tuple[float, int]:
    """Return the mean cross-entropy over all predicted tokens of the rows, in nats, and the number of these tokens.

    The rows are computed in batches of `ROWS`, padded with `pad_token_id`.
    """
    total, tokens, left = 0.0, 0, iter(rows)
    while group := [*islice(left, ROWS)]:
        batch = collate(group, pad_token_id)
        loss, predicted = held_out_loss(model, {name: tensor.to(model.device) for name, tensor in batch.items()})
        total, tokens = total + loss.item(), tokens + int(predicted)
    return total / tokens, tokens
