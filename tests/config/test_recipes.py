"""What the header of a recipe says is what is predicted of it."""

import re

import pytest

from moetune.config.load import load_run_config
from moetune.config.recipes import read_recipe, recipes
from moetune.planning.predictor import Predictor
from tests.cli.test_commands import ROOT

SAID = re.compile(
    r"^# Predicted: needs ([\d.]+) GiB of (each )?([\w-]+)(?:, and ([\d.]+) GiB of host memory)?\.", re.MULTILINE
)
BIG = [name for name in recipes() if not name.startswith("tiny")]


@pytest.mark.full
@pytest.mark.parametrize("name", BIG)
def test_a_recipe_needs_what_it_says(name: str) -> None:
    text = read_recipe(name)
    config = load_run_config(ROOT / "configs" / f"{name}.yaml")
    assert f"#     moetune train configs/{name}.yaml\n" in text
    said = SAID.search(text)
    assert said is not None, "the header does not say what is predicted"
    gib, each, card, host = said.groups()
    assert (card, bool(each)) == (config.hardware.gpu, config.parallel.ranks > 1)
    report = Predictor().report(config)  # the least: train.expert_memory: auto takes more where some is left
    assert report.required / 2**30 == pytest.approx(float(gib), abs=0.02)
    assert report.fullest.host_bytes / 2**30 == pytest.approx(float(host or 0), abs=0.02)
    assert report.verdict == "yes"
