"""docs/benchmarks/step_model.md: one of its cases is what scripts/bench/step_model.py prints."""

import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT, BENCH = Path(__file__).parents[1], "step_model"


@pytest.mark.full
def test_a_case_is_the_scripts(bench: ModuleType) -> None:
    case = "OLMoE-1B-7B, LoRA r16"
    kept = json.loads((ROOT / "docs/benchmarks/step_model.json").read_text(encoding="utf-8"))["cases"][case]
    found = {gpu: bench.duration_of(case, gpu) for gpu in bench.CARDS}
    assert {gpu: time.to_json() for gpu, time in found.items()} == kept
    page = (ROOT / "docs/benchmarks/step_model.md").read_text(encoding="utf-8")
    of_case = page.partition(f"## {case}")[2].partition("\n## ")[0]
    assert of_case.strip() in bench.cases({case: found})
