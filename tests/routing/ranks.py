"""Scoring as one of several ranks, for processes that tests start."""

import json
from pathlib import Path
from typing import Any

from moetune.parallel.ranks import Ranks
from moetune.routing.score import score, to_score
from moetune.run.resolve import resolve
from tests import small


def scored(layouts: list[dict[str, Any]], model: Path, data: Path) -> list[str]:
    """What each layout counts, as text."""
    return [_scored(layout, model, data) for layout in layouts]


def _scored(layout: dict[str, Any], model: Path, data: Path) -> str:
    config = small.run_config(model, data, Path("unused"), "lora", model={"base": "fp32"}, parallel=layout)
    run = resolve(to_score(config), "cpu")
    return score(run, [str(data)], 10**9, device="cpu", ranks=Ranks.join(config.parallel, "cpu")).to_text()


def statistics(text: str) -> tuple[Any, Any]:
    """(what is counted, what is a sum of floats), by layer and scope."""
    layers = json.loads(text)["layers"]
    exact = ("count", "tokens", "share", "interval", "pairs", "unused")
    both = [(layer[scope], f"{index} {scope}") for index, layer in layers.items() for scope in ("loss", "all")]
    counted = {name: {key: of[key] for key in exact} for of, name in both}
    summed = {name: [of["entropy"], *of["probability"], *of["weight_sum"], *of["reap"]] for of, name in both}
    return counted, summed
