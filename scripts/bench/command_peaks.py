"""Peaks of what is no step of `moetune train`, predicted beside measured on the null device: predict_vs_measured.py.

Trainers of TRL train the recipe of Mixtral-8x7B with LoRA, with random weights. The other commands run as a user types
them, on a small Mixtral in a folder: first with `--predict`, then for real. What they have on a GPU is
counted by torch's allocator; what `export --format merged` has in host memory by the trace's tracker, on real tensors.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from torch import Tensor
from transformers import MaxLengthCriteria

from moetune.cli.main import app
from moetune.config.schema import RunConfig
from moetune.inference import evaluate
from moetune.memory.assumed_routing import BALANCED
from moetune.memory.commands.trl import predict_trl
from moetune.memory.measurement.measure import catalog_name
from moetune.memory.trace.tracker import Tracker
from moetune.run.resolve import resolve
from moetune.training.trl import TrlTrainer
from tests import small
from tests.nullcuda.trl import measured as measured_trl

SIZES = {"hidden_size": 1024, "intermediate_size": 2048, "num_local_experts": 8, "num_attention_heads": 16}
TEXT = "a router sends every token of the text to two of eight experts and adds what they say. "
Peaks = tuple[int, int]
"""Bytes: predicted, measured."""


def of_trainer(kind: TrlTrainer, more: dict[str, Any], config: RunConfig, folder: Path) -> Peaks:
    """Two steps of a TRL trainer."""
    run = resolve(config, "cuda")
    predicted = predict_trl(run, kind, more, gpu=catalog_name(torch.device("cuda", 0)), routing=BALANCED)
    return predicted.fullest.peak_allocated, measured_trl(run, kind, more, folder / "trained")


def called(*words: str | Path) -> str:
    """Run a command in this process; return what it prints."""
    with redirect_stdout(io.StringIO()) as out:
        app([*map(str, words)], standalone_mode=False)
    return out.getvalue()


class Enough(Exception):
    """All tokens were generated, which the values of no tensor say here."""


@contextmanager
def without_values() -> Iterator[None]:
    """Inside, a count of tokens is 1, and generating ends by an `Enough` when it is long enough."""
    counted = evaluate.held_out_loss

    def is_long_enough(self: MaxLengthCriteria, ids: Tensor, *_: Any, **__: Any) -> Tensor:
        if ids.shape[1] >= self.max_length:
            raise Enough
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    with (
        patch.object(evaluate, "held_out_loss", lambda *batch: (counted(*batch)[0], 1)),
        patch.object(MaxLengthCriteria, "__call__", is_long_enough),
        suppress(Enough),
    ):
        yield


def of_command(words: Callable[[Path], list[str | Path]], real: tuple[str, ...], folder: Path) -> Peaks:
    """A command on a small model; `real` are words that only the real run is given, of which OUT is a new path."""
    given = words(folder)
    predicted = json.loads(called(*given, "--predict", "--json"))["ranks"][0]["peak_allocated"]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with without_values():
        called(*given, *(str(folder / "out") if word == "OUT" else word for word in real))
    return predicted, torch.cuda.max_memory_allocated() - before


def merged(folder: Path) -> Peaks:
    """`export --format merged` of a run that trained: bytes of host memory."""
    called("train", run_file(folder))
    words = "export", folder / "run", "--format", "merged"
    predicted = json.loads(called(*words, "--predict", "--json"))["ranks"][0]["peak_allocated"]
    with Tracker({}) as tracker:
        called(*words, "--out", folder / "merged")
    return predicted, tracker.peak_bytes


def model(folder: Path) -> Path:
    return (
        folder / "model" if (folder / "model").exists() else small.write_model(folder / "model", **SIZES, head_dim=64)
    )


def data(folder: Path) -> Path:
    return small.write_data(folder / "data.jsonl", [{"prompt": TEXT, "completion": TEXT * 20} for _ in range(16)])


def run_file(folder: Path) -> Path:
    """LoRA on attention and experts: two steps of two rows of 512 tokens."""
    lora = {"rank": 16, "alpha": 32, "targets": ["attention", "experts"]}
    train = {"sequence_length": 512, "steps": 2, "accumulate": 1}
    long = {"data": {"too_long": "truncate"}, "train": train}
    run = small.run_file(model(folder), data(folder), folder / "run", "lora", **long) | {"adapt": {"lora": lora}}
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(run), encoding="utf-8")
    return file


def cases(lora: RunConfig) -> dict[str, Callable[[Path], Peaks]]:
    """Return each case by name: a function of an empty folder. `lora` is what trainers train."""
    trainers: list[tuple[TrlTrainer, dict[str, Any]]] = [
        ("sft", {}),
        ("dpo", {"precompute_ref_log_probs": False}),
        ("kto", {"precompute_ref_log_probs": False}),
        ("orpo", {}),
        ("grpo", {"max_completion_length": 16, "beta": 0.1}),
    ]
    commands: dict[str, tuple[Callable[[Path], list[str | Path]], tuple[str, ...]]] = {
        "score": (lambda folder: ["score", run_file(folder)], ("--out", "OUT")),
        "eval": (lambda folder: ["eval", model(folder), "--data", data(folder)], ()),
        "generate": (
            lambda folder: ["generate", model(folder), "--prompt", TEXT * 8, "--max-new-tokens", "64"],
            (),
        ),
        "quantize": (lambda folder: ["quantize", model(folder)], ("--out", "OUT")),
    }
    return {
        **{f"TRL {kind.upper()}": partial(of_trainer, kind, more, lora) for kind, more in trainers},
        **{name: partial(of_command, *given) for name, given in commands.items()},
        "export --format merged": merged,
    }
