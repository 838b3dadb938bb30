"""`moetune export --check`: an export's loss, loaded by stock libraries, beside the trained model's."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from moetune.errors import UserError, note
from moetune.inference.evaluate import mean_loss, rows_of
from moetune.inference.opened import Opened, open_model
from moetune.training.data.load import load_data, pad_token_id
from moetune.training.step.batch import Row

_LENGTH = 64  # tokens in a row of random tokens


@dataclass(frozen=True)
class LossCheck:
    """The mean cross-entropy, in nats, of a trained model and of its export on the same rows.

    Attributes:
        rows: the number of rows.
        of: where the rows are from: `held-out data`, `training data` or `random tokens`.
        tokens: the number of predicted tokens.
        trained_loss, exported_loss: the loss of each of the two.
        unread: why random tokens took the place of the run's data; None if the data were read, or the run has none.
    """

    rows: int
    of: str
    tokens: int
    trained_loss: float
    exported_loss: float
    unread: str | None = None


def check_export(run: Path, exported: Path, rows: int = 256, *, rounded: bool = False) -> LossCheck | None:
    """Compute the losses of the model trained in the folder `run` and of its export, on at most `rows` rows.

    `exported` is the folder of a merged checkpoint or a PEFT adapter. The rows are the first of the run's held-out
    data, else of its training data, or random tokens if the run has no data, or they cannot be read any more. The
    models are in memory as a whole, one after the other. They compute in float32 on the CPU, the export by transformers
    and PEFT; with `rounded`, for a checkpoint in a quantized format, on the device and in the dtype that `open_model`
    chooses, and on held-out data alone: without them, or if they cannot be read, which a note says, the result is None.
    The losses differ by the rounding to the checkpoint's dtype and, if the run quantized its base, by the quantization
    error.

    Raises:
        UserError: the run or the export cannot be opened.
    """
    options: dict[str, Any] = {} if rounded else {"device": "cpu", "dtype": "fp32"}
    trained = open_model(str(run), **options)
    read, data, pad, unread = _rows(trained, rows)
    if rounded and data != "held-out data":
        if unread is not None:
            note(f"losses are not compared: {unread}")
        return None
    expected, tokens = mean_loss(trained.model, read, pad)
    del trained
    loss, _ = mean_loss(open_model(str(exported), stock=not rounded, **options).model, read, pad)
    return LossCheck(len(read), data, tokens, expected, loss, unread)


def _rows(trained: Opened, count: int) -> tuple[list[Row], str, int, str | None]:
    """Return at most `count` rows, where they are from (`LossCheck.of`), the id of the padding token, and why the run's
    data could not be read, or None."""
    config = trained.config
    assert config is not None
    unread = None
    if config.data is not None:
        try:
            pad = pad_token_id(trained.tokenizer)
            if config.data.evaluates:
                return [*islice(rows_of(trained)[0], count)], "held-out data", pad, None
            data = config.data.but(packing=False, chat_template=None, template={})
            return [*islice(load_data(data, trained.tokenizer, config.train).train, count)], "training data", pad, None
        except UserError as error:
            unread = str(error)
    draw = torch.Generator().manual_seed(config.train.seed)
    vocabulary = trained.model.config.get_text_config().vocab_size
    ids = [torch.randint(vocabulary, (_LENGTH,), generator=draw).numpy() for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in ids], "random tokens", 0, unread
