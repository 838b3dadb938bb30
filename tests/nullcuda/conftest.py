"""The state in which every test on the null device begins."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nullcuda import device, runs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/nullcuda/"):
            item.add_marker(pytest.mark.nullcuda)


@pytest.fixture(autouse=True)
def _ready() -> Iterator[None]:
    if not device.is_present():
        yield
        return
    runs.clear()
    with device.answering():
        yield


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a Mixtral of two layers, in a folder."""
    return runs.write_toy(tmp_path_factory.mktemp("models") / "toy-mixtral")
