"""The table of formats in docs/concepts/loading.md: each of its cells is a test that exists, and runs with `--all`."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moetune.adapt.count import count
from moetune.formats.base import Quantized
from moetune.formats.checkpoint import open_checkpoint
from tests.published import write_4bit, write_fp8, write_mxfp4, write_nvfp4

ROOT = Path(__file__).parents[2]
COLUMNS = ("count", "predict", "train", "merge", "export", "back")
SIZES: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 64}
WRITERS: dict[str, Any] = {
    "mxfp4": write_mxfp4,
    "4bit": partial(write_4bit, model_type="mixtral", **SIZES),
    "fp8": partial(write_fp8, model_type="qwen3_moe", **SIZES),
    "nvfp4": partial(write_nvfp4, model_type="qwen3_moe", **SIZES),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_weights_are_counted(kind: str, tmp_path: Path) -> None:
    """Those that the tensors stand for, experts and linear layers among them."""
    stored = open_checkpoint(WRITERS[kind](tmp_path))
    assert any(isinstance(tensor, Quantized) for tensor in stored.values())
    assert count(str(tmp_path)).parameter_count.total == sum(tensor.numel for tensor in stored.values())


HERE = "docs/test_formats_table.py::test_weights_are_counted"
READS = "adapt/weights/test_source_quantization.py::test_"
KEPT = "formats/test_as_published.py::test_experts_and_linear_layers_are_kept"
EXPORTS = "exporting/test_published.py::test_"
PLAIN = f"{EXPORTS}other_formats_are_exported_in_16_bits"
BACK = "exporting/writers/test_rounded.py::test_a_published_format_is_written_again"


def row(kind: str, counts: str = KEPT, predicts: str = KEPT, trains: str = KEPT, back: str = BACK) -> list[str]:
    """A test for each column, with the parameter that names the format."""
    return [*(f"{test}[{kind}]" for test in (counts, predicts, trains, PLAIN, PLAIN)), back and f"{back}[{kind}]"]


READ = f"{READS}reading_takes_what_is_predicted"
VALUES = f"{READS}values_are_kept_to_the_bit"
CELLS: dict[str, list[list[str]]] = {
    "MXFP4 of gpt-oss": [
        [
            f"{HERE}[mxfp4]", f"{READ}[mxfp4-auto]", f"{READS}mxfp4_has_transformers_values_to_the_bit[auto]",
            f"{EXPORTS}a_merged_checkpoint_has_frozen_weights_as_transformers_unpacks_them[lora]",
            f"{EXPORTS}exports_compute_what_the_run_does[lora]", f"{BACK}[mxfp4]",
        ]
    ],
    "FP4 + FP8 of DeepSeek-V4": [row("deepseek_v4")],
    "NVFP4": [row("nvfp4", HERE, READ, VALUES)],
    "FP8 in blocks, per row, per matrix": [
        row("fp8", HERE, READ, VALUES),
        *(row(kind) for kind in ("row", "tensor", "modelopt")),
    ],
    "MXFP8": [row("mxfp8")],
    "INT4 of compressed-tensors, GPTQ, AWQ, AutoRound": [
        row("compressed-tensors"), *(row(kind) for kind in ("gptq", "awq", "auto-round")),
    ],
    "4 bits of bitsandbytes": [row("4bit", HERE, READ, VALUES, "")],
}  # fmt: skip
"""Row of the table -> for each format in it a test of each column; empty where the table has a dash."""
NAMED = {f"{BACK}[compressed-tensors]": f"{BACK}[pack-quantized]", f"{VALUES}[4bit]": f"{VALUES}[nf4]"}
"""Tests whose parameter has another name there: compressed-tensors is NVFP4's, 4bit is bitsandbytes' own."""
TESTS = [test for rows in CELLS.values() for tests in rows for test in tests if test]


def test_each_cell_names_a_function() -> None:
    for file, function in {tuple(test.partition("[")[0].split("::")) for test in TESTS}:
        assert f"def {function}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), function


@pytest.mark.full
def test_each_cell_is_a_test() -> None:
    page = (ROOT / "docs" / "concepts" / "loading.md").read_text(encoding="utf-8")
    lines = page[page.index("| | count | predict |") :].partition("\n\n")[0].splitlines()[2:]
    table = {cells[0]: cells[1:] for line in lines for cells in [[cell.strip() for cell in line.strip("|").split("|")]]}
    assert table.keys() == CELLS.keys()
    files = sorted({test.partition("::")[0] for test in TESTS})
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--all", "-p", "no:cacheprovider"]
    asked = subprocess.run([*words, *(f"tests/{file}" for file in files)], cwd=ROOT, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stdout
    there = asked.stdout.splitlines()
    for name, rows in CELLS.items():
        for tests in rows:
            assert len(tests) == len(table[name]) == len(COLUMNS)
            for test, cell in zip(tests, table[name], strict=True):
                assert bool(test) == (cell != "–"), (name, cell)
                if test:
                    assert any(is_case(NAMED.get(test, test), case) for case in there), test


def is_case(test: str, case: str) -> bool:
    """Whether a collected test is the test, with the parameter among its own."""
    function, _, parameter = test.rstrip("]").partition("[")
    return re.match(rf"tests/{re.escape(function)}\[(.*-)?{re.escape(parameter)}(-.*)?\]$", case) is not None
