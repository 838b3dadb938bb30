"""The page on models says what is predicted now."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import which_models

DATA = json.loads(which_models.DATA.read_text(encoding="utf-8"))
QUICK = "olmoe-1b-7b"


def test_the_page_has_a_row_of_every_model() -> None:
    table = "\n".join(which_models.table(DATA))
    assert f"\n{table}\n\n" in which_models.PAGE.read_text(encoding="utf-8"), "run scripts/which_models.py"
    assert sorted(DATA) == which_models.MODELS


@pytest.mark.parametrize("way", ["router", pytest.param("experts", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "name", [name if name == QUICK else pytest.param(name, marks=pytest.mark.full) for name in DATA]
)
def test_a_model_needs_what_the_page_says(name: str, way: str) -> None:
    found, said = which_models.cell(name, way), DATA[name][way]
    assert found["card"] == said["card"]
    assert found["bytes"] == pytest.approx(said["bytes"], rel=0.002)


@pytest.mark.full
@pytest.mark.parametrize("name", DATA)
def test_lora_needs_and_takes_what_the_page_says(name: str) -> None:
    assert which_models.figures(name) == DATA[name]
