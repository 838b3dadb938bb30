"""When the tests of this folder run, and the emulated GPUs."""

import pytest

from tests.nullcuda import device


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a push scripts/test_cuda.sh runs them; elsewhere they are left out unless they are asked for."""
    mine = [item for item in items if item.nodeid.startswith("tests/ptx/")]
    for item in mine:
        item.add_marker(pytest.mark.ptx)
    if not (device.is_present() or config.getoption("--all") or "ptx" in config.option.markexpr):
        for item in mine:
            item.add_marker(pytest.mark.skip(reason="runs with `-m ptx`, `--all` or scripts/test_cuda.sh"))
