"""A case of docs/benchmarks/step_model.md is what its script prints."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.full
def test_a_case_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts/bench"))
    script = importlib.import_module("step_model")
    case = "OLMoE-1B-7B, LoRA r16"
    kept = json.loads((ROOT / "docs/benchmarks/step_model.json").read_text(encoding="utf-8"))["cases"][case]
    found = {gpu: script.duration_of(case, gpu) for gpu in script.CARDS}
    assert {gpu: time.to_json() for gpu, time in found.items()} == kept
    page = (ROOT / "docs/benchmarks/step_model.md").read_text(encoding="utf-8")
    of_case = page.partition(f"## {case}")[2].partition("\n## ")[0]
    assert of_case.strip() in script.cases({case: found})
