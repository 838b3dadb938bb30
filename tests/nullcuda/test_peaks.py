"""Commands that do not train take on the card what `--predict` says of them, in a step and while weights are loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.generation.utils import GenerationMixin

from moetune.cli.main import app
from moetune.training import isolation
from tests import small
from tests.memory.peaks import MODELS, write

PAGES = 22 << 20
"""Bytes of a page of each of the allocator's pools. What stays in one after loading is not known."""
SMALL = {"hidden_size": 512, "intermediate_size": 1024}
TEXT = "a router sends every token to two of four experts "
ON_A_PUSH = (("eval", "mixtral"), ("generate", "qwen3_moe"), ("score", "olmoe"), ("quantize", "deepseek_v2"))


def cases() -> list[Any]:
    """Each command with each model: small ones of a few types on a push, wide ones with `--all`."""
    small_ones = [pytest.param(*case, SMALL, id=f"{'-'.join(case)}-small") for case in ON_A_PUSH]
    wide = product(("eval", "generate", "score", "quantize"), MODELS)
    full = [*((*case, {}) for case in wide), *(("export", model_type, SMALL) for model_type in MODELS)]
    return small_ones + [pytest.param(*case, id="-".join(case[:2]), marks=pytest.mark.full) for case in full]


@pytest.fixture(autouse=True)
def _ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text ends at its greatest length, which transformers asks the card; and no model counts as damaged, which
    every number that is read from the null device says."""
    is_long, lengths = MaxLengthCriteria.__call__, []

    def noted(self: MaxLengthCriteria, ids: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        if ids.shape[1] >= self.max_length:
            lengths.append(ids.shape[1])
        return is_long(self, ids, *more, **named)

    monkeypatch.setattr(MaxLengthCriteria, "__call__", noted)
    monkeypatch.setattr(GenerationMixin, "_has_unfinished_sequences", lambda *_, **__: not lengths)
    monkeypatch.setattr(isolation, "refuse_broken_weights", lambda model: None)


def run(*command: object) -> None:
    app([*map(str, command)], standalone_mode=False)


def trained(model: Path, here: Path) -> Path:
    """A run of one step with LoRA, on the CPU: the null device has no values that could be exported."""
    data = small.write_data(here / "train.jsonl")
    settings = small.run_file(model, data, here / "run", "router", train={"steps": 1, "accumulate": 1})
    settings["adapt"] = {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}}
    (here / "run.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "moetune", "train", str(here / "run.yaml")]
    subprocess.run(command, env={**os.environ, "LD_PRELOAD": ""}, capture_output=True, check=True)
    return here / "run"


@pytest.mark.parametrize(("command", "model_type", "sizes"), cases())
def test_the_card_holds_what_is_predicted(
    command: str, model_type: str, sizes: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    what = write(tmp_path / "model", model_type, zeros=True, max_position_embeddings=4096, **sizes)
    data, out = tmp_path / "rows.jsonl", ("--out", tmp_path / "out")
    data.write_text("".join(json.dumps({"text": TEXT * times}) + "\n" for times in (9, 60, 40, 80, 80, 80, 80)))
    match command:
        case "eval":
            asked, out = ("eval", what, "--data", data), ()
        case "generate":
            asked, out = ("generate", what, "--prompt", TEXT * 20, "--max-new-tokens", 24), ()
        case "score":
            asked = ("score", what, "--data", data)
        case "quantize":
            asked = ("quantize", what)
        case _:
            asked = ("export", trained(what, tmp_path), "--format", "merged")
    capsys.readouterr()
    run(*asked, "--predict", "--json")
    report = json.loads(capsys.readouterr().out)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with suppress(ZeroDivisionError, ValidationError):  # means of nothing, after all has run
        run(*asked, *out)
    taken, reserved = torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved()
    if command == "export":
        assert (report["device"], taken) == ("cpu", 0)
        return
    (rank,), load = report["ranks"], report["load"]["gpu"]
    assert max(rank["peak_allocated"], load) == pytest.approx(taken, rel=0.01)
    assert max(rank["peak_reserved"], load) == pytest.approx(reserved, rel=0.01, abs=PAGES)
