"""What the tests of layouts share."""

import json
from pathlib import Path

import pytest

from tests.parallel import layouts, world


@pytest.fixture(scope="session")
def alone(small_model: Path) -> dict[layouts.Case, layouts.Outcome]:
    """What one process takes, by case: what every layout is compared with."""
    return dict(zip(layouts.CASES, world.run(1, layouts.every_case, {}, small_model)[0], strict=True))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A user's JSON, under which DeepSpeed's stage 3 shares even what is small."""
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": "auto", "stage3_param_persistence_threshold": 0}}))
    return file
