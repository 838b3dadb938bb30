"""docs/benchmarks/scaling.md: one of its rows is what scripts/bench/scaling.py prints."""

from pathlib import Path
from types import ModuleType

import pytest

ROOT, BENCH = Path(__file__).parents[1], "scaling"


@pytest.mark.full
def test_a_row_of_the_tables_is_the_scripts(bench: ModuleType) -> None:
    page = (ROOT / "docs" / "benchmarks" / "scaling.md").read_text(encoding="utf-8")
    of_model = page.partition("### mixtral-8x7b, lora")[2].partition("###")[0].replace("**", "")
    assert bench.line(2, bench.row_of("mixtral-8x7b", "lora", 2, "ep 2"), ()) in of_model
