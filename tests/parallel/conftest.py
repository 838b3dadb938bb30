"""What one process takes: what every layout is compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel import layouts, world


@pytest.fixture(scope="session")
def alone(small_model: Path) -> list[layouts.Outcome]:
    """By case."""
    return world.run(1, layouts.every_case, {}, small_model)[0]
