"""README's pictures show, and its text states, what is predicted now."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import make_images

FIGURES = json.loads((make_images.IMAGES / "figures.json").read_text(encoding="utf-8"))
README = (make_images.ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_shows_the_pictures_that_are_made_and_states_their_figures() -> None:
    shown = set(re.findall(r"\(docs/images/(\S+)\)", README))
    assert shown == {name for name in FIGURES if name.endswith(".png")}
    assert all((make_images.IMAGES / name).is_file() for name in shown)
    host = FIGURES["mixtral-8x22b-lora-host"]
    assert f"takes {host['reserved'] / 2**30:.0f} GiB of a GPU and {host['host'] / 2**30:.0f} of the host" in README


@pytest.mark.full
@pytest.mark.parametrize("name", FIGURES)
def test_the_figures_are_those_of_today(name: str) -> None:
    assert make_images.made(name, draw=False) == FIGURES[name], f"run scripts/make_images.py {name}"
