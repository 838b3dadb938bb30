"""What the tests of layouts share."""

import json
from pathlib import Path

import pytest

from tests.parallel import layouts, world


@pytest.fixture(scope="session")
def cases(pytestconfig: pytest.Config) -> list[layouts.Case]:
    """What layouts are tried with."""
    return layouts.CASES if pytestconfig.getoption("--all") else layouts.ON_A_PUSH


@pytest.fixture(scope="session")
def alone(small_model: Path, cases: list[layouts.Case]) -> dict[layouts.Case, layouts.Outcome]:
    """What one process takes, by case: what every layout is compared with."""
    return dict(zip(cases, world.run(1, layouts.every_case, {}, small_model, cases)[0], strict=True))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A user's JSON, under which DeepSpeed's stage 3 shares even what is small."""
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": "auto", "stage3_param_persistence_threshold": 0}}))
    return file
