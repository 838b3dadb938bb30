"""Held-out loss of anything that can be opened, over the same sequences whatever it is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import PreTrainedModel

from moetune.config.schema import DataConfig, RunConfig, TrainConfig, data_sets
from moetune.errors import UserError
from moetune.files import expanded
from moetune.inference.opened import Opened, open_model
from moetune.training.data.load import load_data, pad_token_id, refuse_unknown_tokens
from moetune.training.step.batch import Row, collate
from moetune.training.step.micro_step import held_out_loss

_ROWS = 4
_MOST_LOSS = 700.0  # nats: beyond, a perplexity is no number


@dataclass(frozen=True)
class Evaluation:
    """The mean loss over every predicted token, in nats, and the number of these tokens.

    Attributes:
        step: of the checkpoint, of a run.
        held_out: whether the run kept these data apart; False if it trained on them, None where neither is known.
    """

    model: str
    kind: str
    data: str
    records: int
    tokens: int
    loss: float
    step: int | None = None
    held_out: bool | None = None

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    def to_json(self) -> dict[str, Any]:
        return {"schema": 1, **asdict(self), "perplexity": self.perplexity}


def evaluate(
    opened: Opened | Path | str, data: str | None = None, sequence_length: int | None = None, format: str | None = None
) -> Evaluation:
    """Evaluate on a data set, each record in a sequence of its own.

    Args:
        data: as `data.train` in a run file; by default what the run held out.
        sequence_length: tokens; by default the run's, else a run file's default.
        format: by default the run's, else `auto`.

    Raises:
        UserError: there are no data, or they cannot be used.
    """
    opened = opened if isinstance(opened, Opened) else open_model(str(opened))
    rows, name = rows_of(opened, data, sequence_length, format)
    loss, tokens = mean_loss(opened.model, rows, pad_token_id(opened.tokenizer))
    if not loss < _MOST_LOSS:
        raise UserError(f"the loss of {opened.name!r} is {loss}: its weights or config.json give none")
    return Evaluation(
        opened.name, opened.kind, name, len(rows), tokens, loss, opened.step, _is_held_out(opened.config, data)
    )


def _is_held_out(config: RunConfig | None, data: str | None) -> bool | None:
    if data is None:
        return True
    given = None if config is None else config.data
    if given is None:
        return None

    asked = expanded(data).resolve()
    trained, held_out = (
        asked in {expanded(name).resolve() for name, _ in data_sets(part)} for part in (given.train, given.eval)
    )
    return False if trained else True if held_out else None


def rows_of(
    opened: Opened, data: str | None = None, sequence_length: int | None = None, format: str | None = None
) -> tuple[datasets.Dataset, str]:
    """Return the rows to evaluate on, one record each, and their name; refuse tokens that the model does not have."""
    config = opened.config
    train = TrainConfig() if config is None else config.train
    if sequence_length is not None:
        train = train.but(sequence_length=sequence_length)
    given = None if config is None else config.data
    settings = DataConfig(train="none") if given is None else given
    settings = settings.but(packing=False, chat_template=None)  # the tokenizer has it
    if format is not None:
        settings = DataConfig.model_validate(settings.model_dump() | {"format": format})
    if data is not None:
        settings = settings.but(train=data, eval=None, validation=None)
    elif given is None or not given.evaluates:
        raise UserError(f"{opened.name!r} has no held-out data of its own; name some with --data")
    read = load_data(settings, opened.tokenizer, train)
    rows = read.eval if data is None else read.train
    assert rows is not None
    refuse_unknown_tokens(opened.model.config, opened.name, pad_token_id(opened.tokenizer), rows)
    return rows, data or "what the run held out"


@torch.no_grad()
def mean_loss(model: PreTrainedModel, rows: Iterable[Row], pad_token_id: int) -> tuple[float, int]:
    """Return the mean cross-entropy over every predicted token, in nats, and the number of these tokens."""
    total, tokens, left = 0.0, 0, iter(rows)
    while some := [*islice(left, _ROWS)]:
        batch = collate(some, pad_token_id)
        loss, predicted = held_out_loss(model, {name: tensor.to(model.device) for name, tensor in batch.items()})
        total, tokens = total + loss.item(), tokens + int(predicted)
    return total / tokens, tokens
