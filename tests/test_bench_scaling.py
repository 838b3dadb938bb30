"""The tables of docs/benchmarks/scaling.md are what its script prints."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("model", "adapt"), [("mixtral-8x7b", "lora"), ("mixtral-8x22b", "experts")])
def test_the_tables_are_the_scripts(model: str, adapt: str) -> None:
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "scripts" / "bench" / "scaling.py")
    assert spec is not None
    assert spec.loader is not None
    scaling = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = scaling  # dataclasses look there
    spec.loader.exec_module(scaling)
    page = (ROOT / "docs" / "benchmarks" / "scaling.md").read_text(encoding="utf-8")
    assert "\n".join(scaling.table(model, adapt)).rstrip() in page
