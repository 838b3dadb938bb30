"""Several ranks count what one counts: exactly, whatever they share."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import small
from tests.parallel import world
from tests.routing import ranks

ON_TWO: list[dict[str, Any]] = [{"replicate": 2}, {"fsdp": 2}, {"fsdp": 2, "ep": 2}]
ON_FOUR: list[dict[str, Any]] = [
    {"fsdp": 2, "tp": 2, "ep": 4},
    {"fsdp": 4, "ep": 2},
    {"replicate": 2, "fsdp": 2, "ep": 4},
]


@pytest.fixture(scope="module")
def odd_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of five batches, so that the last round has no batch for some rank."""
    return small.write_data(tmp_path_factory.mktemp("data") / "odd.jsonl", small.DATA[:9])


@pytest.fixture(scope="module")
def alone(small_model: Path, odd_data: Path) -> str:
    (text,) = ranks.scored([{}], small_model, odd_data)
    return text


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("number", "layouts"), [(2, ON_TWO), pytest.param(4, ON_FOUR, marks=pytest.mark.full)], ids=["two", "four"]
)
def test_ranks_count_what_one_counts(
    number: int, layouts: list[dict[str, Any]], alone: str, small_model: Path, odd_data: Path
) -> None:
    counted, summed = ranks.statistics(alone)
    for of_rank in world.run(number, ranks.scored, layouts, small_model, odd_data):
        for layout, text in zip(layouts, of_rank, strict=True):
            its_counts, its_sums = ranks.statistics(text)
            assert its_counts == counted, layout
            for name, values in summed.items():
                assert its_sums[name] == pytest.approx(values, rel=1e-5), (layout, name)


@pytest.mark.full
def test_the_command_starts_its_ranks(alone: str, small_model: Path, odd_data: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "run.yaml", tmp_path / "scores.json"
    run = small.run_file(small_model, odd_data, tmp_path / "run", "lora", model={"base": "fp32"}, parallel=ON_TWO[2])
    file.write_text(yaml.safe_dump(run), encoding="utf-8")
    command = [sys.executable, "-m", "moetune", "score", str(file), "--out", str(out), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["expert_load"] == json.loads(alone)["expert_load"]
    assert ranks.statistics(out.read_text())[0] == ranks.statistics(alone)[0]
