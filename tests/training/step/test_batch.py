"""Rows that are made up become the batches that data become."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from moetune.config.schema import DataConfig, TrainConfig
from moetune.training.data.load import load_data
from moetune.training.step.batch import collate, random_rows
from moetune.training.step.loss import IGNORED

LENGTH = 48


@pytest.mark.parametrize("packing", [True, False])
def test_made_up_rows_are_like_those_of_data(packing: bool, small_model: Path, small_data: Path) -> None:
    data = DataConfig(train=str(small_data), packing=packing)
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    rows = list(load_data(data, tokenizer, TrainConfig(sequence_length=LENGTH)).train)[:3]
    real = collate(rows, 0)
    made_up = collate(random_rows(3, LENGTH, 50, packing=packing), 0, at_least=LENGTH)
    assert made_up.keys() == real.keys()
    assert {name: tensor.dtype for name, tensor in made_up.items()} == {name: t.dtype for name, t in real.items()}
    assert all(tensor.shape == (3, LENGTH) for tensor in made_up.values())
    if packing:
        assert made_up["position_ids"][0].tolist() == [*range(LENGTH // 2)] * 2
    else:
        assert made_up["attention_mask"].sum(1).tolist() == [LENGTH - 1, LENGTH, LENGTH]


def test_rows_are_padded_on_the_right() -> None:
    rows: list[Any] = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8], "labels": [IGNORED]}]
    batch = collate(rows, 3, at_least=4)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 3], [8, 3, 3, 3]]
    assert batch["labels"].tolist() == [[5, 6, 7, IGNORED], [IGNORED] * 4]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert all(torch.equal(tensor, batch[name][:, :3]) for name, tensor in collate(rows, 3).items())


def test_a_seed_makes_the_same_rows() -> None:
    random.seed(3)
    first = collate(random_rows(2, 8, 100, packing=True), 0)
    random.seed(3)
    assert collate(random_rows(2, 8, 100, packing=True), 0)["input_ids"].equal(first["input_ids"])
