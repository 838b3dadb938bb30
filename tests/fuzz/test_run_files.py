"""Damaged run files and `--set`: a configuration that reads back equal, or one short message."""

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from moetune.config.load import load_run_config
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from tests.fuzz.damage import HOSTILE, YAML_SNIPPETS, answer, cases, damaged_yaml, garbled, places, write

WHOLE: dict[str, Any] = RunConfig.model_validate(
    {
        "model": {"path": "tiny-mixtral"},
        "adapt": {
            "router": "0-1", "experts": {"layers": "0-1", "ids": [0, 2]}, "also": ["norm"],
            "lora": {"rank": 4, "alpha": 8},
        },
        "train": {"accumulate": 1},
        "data": {"train": "a.jsonl", "eval": "b.jsonl"},
        "output": "runs/a",
    }
).model_dump(mode="json")  # fmt: skip


def read_back(file: Path, *overrides: str) -> RunConfig:
    config = load_run_config(file, overrides)
    assert RunConfig.model_validate(yaml.safe_load(config.to_yaml())) == config
    return config


def test_run_files(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    answers = []
    for seed in cases(pytestconfig):
        raw = damaged_yaml(WHOLE, random.Random(seed))
        file = write(tmp_path / "run.yaml", raw)
        answers.append(answer(seed, lambda file=file: read_back(file), lambda raw=raw: repr(raw)))
    refused = sum(isinstance(one, UserError) for one in answers)
    assert len(answers) / 10 < refused < len(answers)


def test_set(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    file = write(tmp_path / "run.yaml", yaml.safe_dump(WHOLE).encode())
    keys = [f"{section}.{key}" for section in WHOLE for key in WHOLE[section] or {} if isinstance(WHOLE[section], dict)]
    answers = []
    for seed in cases(pytestconfig):
        draw = random.Random(seed)
        overrides = ["train.steps=7"] if seed % 20 == 0 else []  # which alone is accepted
        for _ in range(draw.choice((1, 1, 2, 5)) if seed % 20 else 0):
            key = draw.choice(
                [*keys, *keys, *WHOLE, "adapt.lora.rank", "optimizer.lora.lr", "a..b", "", ".", "x" * 5000]
            )
            key = garbled(key, draw) if draw.random() < 0.2 else key
            value = draw.choice(YAML_SNIPPETS) if draw.random() < 0.4 else str_of(draw.choice(HOSTILE))
            overrides.append(f"{key}{draw.choice(('=', '=', '=', '', '=='))}{value}")
        answers.append(answer(seed, lambda o=overrides: read_back(file, *o), lambda o=overrides: repr(o)))
    refused = sum(isinstance(one, UserError) for one in answers)
    assert len(answers) / 10 < refused < len(answers)


def str_of(value: Any) -> str:
    try:
        return str(value)
    except ValueError:  # an integer of more digits than Python writes
        return "9" * 5000


def test_every_value_in_every_place(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """No draw: each hostile value at each place; on a push, pairs that lie far apart."""
    pairs = list(product(places(WHOLE), HOSTILE))
    for number, ((node, key), value) in list(enumerate(pairs))[:: 1 if pytestconfig.getoption("--all") else 151]:
        before, node[key] = node[key], value
        file = write(tmp_path / "run.yaml", yaml.safe_dump(WHOLE).encode("utf-8", "surrogatepass"))
        answer(number, lambda file=file: read_back(file), lambda key=key, value=value: f"{key}: {value!r}"[:300])
        node[key] = before


def test_thirty_thousand_unknown_keys(tmp_path: Path) -> None:
    text = "model: {path: tiny-mixtral}\nadapt: {router: all}\n"
    for count in (3000, 30_000):
        file = write(tmp_path / "run.yaml", (text + "".join(f"k{n}: 1\n" for n in range(count))).encode())
        with pytest.raises(UserError, match=r"and 2,990 more|too large for a run file"):
            load_run_config(file)
        answer(count, lambda file=file: load_run_config(file))
