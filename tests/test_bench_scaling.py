"""A row of docs/benchmarks/scaling.md is what its script prints."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.full
def test_a_row_of_the_tables_is_the_scripts() -> None:
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "scripts" / "bench" / "scaling.py")
    assert spec is not None
    assert spec.loader is not None
    scaling = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = scaling  # dataclasses look there
    spec.loader.exec_module(scaling)
    page = (ROOT / "docs" / "benchmarks" / "scaling.md").read_text(encoding="utf-8")
    of_model = page.partition("### mixtral-8x7b, lora")[2].partition("###")[0].replace("**", "")
    assert scaling.line(2, scaling.row_of("mixtral-8x7b", "lora", 2, "ep 2"), ()) in of_model
