"""The catalog's models are predicted."""

from pathlib import Path
from typing import Any

import pytest

import moetune.models.catalog
from moetune.planning.from_options import config_of
from moetune.planning.predict import predict
from moetune.run.resolve import resolve

MODELS = Path(moetune.models.catalog.__file__).parent / "models"
NAMES = sorted(path.stem for path in MODELS.glob("*.json"))
WITH_EXPERTS = [name for name in NAMES if not name.startswith(("llama-1", "llama-3", "llama-6", "llama-7", "tiny"))]


@pytest.mark.parametrize(
    ("name", "option"),
    [
        pytest.param(name, option, marks=() if (name, option) == ("granite-3.1-3b-a800m", "lora") else pytest.mark.full)
        for name in WITH_EXPERTS
        for option in ("router", "lora")
    ],
)
def test_what_a_model_needs_is_predicted(name: str, option: str) -> None:
    """On one card, whether it fits or not: all of the model is there, in 4 bits or somewhat more."""
    what: dict[str, Any] = {"router": "all"} if option == "router" else {"lora": 16}
    config, _ = config_of(name, ["model.base=mxfp4" if name.startswith("gpt-oss") else "model.base=nf4"], **what)
    report = predict(config, gpu="h100-80gb")
    parts = report.fullest.parts
    numbers = sum(one.numel for one in resolve(config, "cuda").structure.parameters)
    assert 4 * numbers < 8 * parts.frozen_weights < 5.5 * numbers
    assert parts.trainable_weights > 0
    if not 120e9 < numbers < 200e9:
        assert report.verdict == ("yes" if numbers < 120e9 else "no")
