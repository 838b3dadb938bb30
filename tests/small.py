"""A Mixtral that trains a step in milliseconds, with data and run files for it.

Two layers of four experts, hidden size 64, random weights, in hub format; the tokenizer is that of `tiny-mixtral`.
`DATA` holds fourteen records of different lengths, so that an epoch does not end with a full batch.
"""

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from moetune.config.schema import PARTS, RunConfig
from moetune.models.catalog import find_model

LAYERS, EXPERTS, TOP_K = 2, 4, 2

ADAPT: dict[str, dict[str, Any]] = {
    "router": {"router": "all"},
    "experts": {"router": "1", "experts": {"layers": "0-1", "ids": [0, 2]}},
    "lora": {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"], "layers": "all", "ids": [1, 3]}},
}
"""The three ways to fine-tune, by name."""

_TEXT = "a router sends every token of the text to two of four experts and adds what they say"
DATA = [{"prompt": _TEXT[: 9 + row % 30], "completion": _TEXT[row % 3 : 4 + (25 * row) % 80]} for row in range(14)]


def write_tokenizer(folder: Path) -> dict[str, Any]:
    """Write the tokenizer of `tiny-mixtral` to the folder, and return that model's configuration."""
    entry = find_model("tiny-mixtral")
    assert entry is not None
    assert entry.folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(entry.folder / name, folder)
    return entry.config


def write_model(folder: Path, **config: Any) -> Path:
    """Write model and tokenizer to the new folder, and return it; `config` changes fields of the configuration."""
    tiny = write_tokenizer(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_local_experts": EXPERTS}
    fields = tiny | sizes | {"head_dim": 16, "num_experts_per_tok": TOP_K, "dtype": "float32"} | config
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**fields)).float()
    for name, parameter in model.named_parameters():
        if "gate.weight" in name:  # so wide that rounding never changes which experts are chosen
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return folder


def write_data(file: Path, rows: list[dict[str, Any]] = DATA) -> Path:
    """Write records as JSONL, and return the file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def run_file(model: Path, data: Path, output: Path, adapt: str = "router", /, **sections: Any) -> dict[str, Any]:
    """Return a run file as a mapping: three steps of two micro-batches of two rows.

    `adapt` is a key of `ADAPT`. `sections` are merged into those of the run file; optimizers by part replace its own.
    """
    run: dict[str, Any] = {
        "model": {"path": str(model)},
        "adapt": deepcopy(ADAPT[adapt]),  # fuzz tests change what they are given
        "optimizer": {"name": "adamw", "lr": 1.0e-2},
        "train": {"micro_batch": 2, "accumulate": 2, "sequence_length": 64, "steps": 3},
        "data": {"train": str(data), "packing": False},
        "output": str(output),
    }
    for name, section in sections.items():
        if name == "optimizer" and any(part in section for part in PARTS):
            run[name] = section
        else:
            run[name] = run.get(name, {}) | section if isinstance(section, dict) else section
    return run


def run_config(model: Path, data: Path, output: Path, adapt: str = "router", /, **sections: Any) -> RunConfig:
    """Return the configuration of the same run file."""
    return RunConfig.model_validate(run_file(model, data, output, adapt, **sections))


def read_metrics(output: Path) -> list[dict[str, Any]]:
    """Return the lines of the metrics in the run folder `output`."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


Configure = Callable[..., RunConfig]
"""The fixture `configure`: `run_config` of the small model and data, into a folder of the test."""

TIMES = ("tokens_per_second", "share_of_limit", "seconds_left")
"""Metrics that depend on the time that a step took."""


def metrics_without_times(output: Path) -> list[dict[str, Any]]:
    """Return the metrics without `TIMES`: they are equal for two runs that compute the same."""
    return [{name: value for name, value in line.items() if name not in TIMES} for line in read_metrics(output)]
