"""docs/benchmarks/scaling.json: one of its rows is what scripts/bench/scaling.py finds."""

import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT, BENCH = Path(__file__).parents[1], "scaling"


@pytest.mark.full
def test_a_row_is_the_scripts(bench: ModuleType) -> None:
    rows = json.loads((ROOT / "docs/benchmarks/scaling.json").read_text(encoding="utf-8"))["rows"]
    assert bench.row_of("mixtral-8x7b", "lora", 2, "ep 2") in rows
