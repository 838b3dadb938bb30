"""Data sets of `moetune score` and `drift`: tokenized rows in a seeded random order."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import datasets
import numpy as np

from moetune.config.schema import DataConfig, RunConfig, data_sets
from moetune.errors import collected, note, raise_problems
from moetune.run.resolve import ResolvedRun
from moetune.training.data.load import load_data, pad_token_id, refuse_unknown_tokens, tokenizer_of


@dataclass(frozen=True)
class RoutedData:
    """The rows read from one data set, in reading order; `digest` is the SHA-256 of all their columns, in hex."""

    name: str
    rows: datasets.Dataset
    digest: str

    def row(self, index: int) -> dict[str, np.ndarray]:
        """Return one row as int64 arrays by column name."""
        return _row(self.rows, index)


def names_of(config: RunConfig) -> list[str]:
    """Return the files or names of the data sets that a run trains on; empty without `data:`."""
    return [] if config.data is None else [name for name, _ in data_sets(config.data.train, config.data.split)]


def read_sources(
    run: ResolvedRun, data: Sequence[str] | None, tokens: int, now: datetime | None = None
) -> tuple[list[RoutedData], int]:
    """Read data sets as rows for training, by the settings in `data:`; also return the id of the padding token.

    Whole rows of each are read, in a random order seeded by `train.seed`, until they have at least `tokens` tokens,
    padding not counted, or all are read.

    Args:
        data: files or names as under `data.train`; None for the run's held-out data, which it must then have.
        now: the time for a chat template that reads the clock; by default the current.

    Raises:
        UserError: a data set cannot be read, or has tokens that the model does not have. The problems of all data sets
            are reported together.
    """
    config, model = run.config, run.model.source
    tokenizer = tokenizer_of(model.name, model.folder)
    options = {} if config.data is None else config.data.model_dump(exclude={"train", "split", "eval", "validation"})
    sources: list[RoutedData] = []
    problems: list[str] = []
    for name in ("held-out data",) if data is None else data:
        with collected(problems):
            if data is None:
                assert config.data is not None
                read = load_data(config.data, tokenizer, config.train, now)
                rows, counts = read.eval, read.eval_counts
            else:
                settings = DataConfig.model_validate({**options, "train": name})
                read = load_data(settings, tokenizer, config.train, now)
                rows, counts = read.train, read.counts
            assert rows is not None
            assert counts is not None
            note(*counts.unread)
            sources.append(some_of(name, rows, config, tokens))
    raise_problems(problems)
    padding = pad_token_id(tokenizer)
    refuse_unknown_tokens(run.model.settings, config.model.path, padding, *(source.rows for source in sources))
    return sources, padding


def some_of(name: str, rows: datasets.Dataset, config: RunConfig, tokens: int) -> RoutedData:
    """Draw rows of the data set `name` in a random order seeded by `train.seed`, until they have at least `tokens`
    tokens, padding not counted, or all are drawn."""
    order = np.random.default_rng(config.train.seed).permutation(len(rows))
    chosen, digest, count = [], hashlib.sha256(), 0
    for index in order.tolist():
        if count >= tokens:
            break
        row = _row(rows, index)
        chosen.append(index)
        count += int(row["is_token"].sum()) if "is_token" in row else len(row["input_ids"])
        for key in sorted(row):
            digest.update(key.encode() + row[key].astype("<i4").tobytes())
    return RoutedData(name, rows.select(chosen), digest.hexdigest())


def _row(rows: datasets.Dataset, index: int) -> dict[str, np.ndarray]:
    """Return one row as int64 arrays by column name."""
    return {name: np.asarray(value, np.int64) for name, value in rows[index].items()}
