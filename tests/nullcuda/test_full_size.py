"""Models at full size take what is predicted, as torch's own allocator counts. `docs/benchmarks/` has all of them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts/bench"))
from predict_vs_measured import CASES, TOO_LARGE, in_own_process

ON_A_PUSH = ("mixtral-8x7b-lora", "mixtral-8x7b-experts", "granite-3.1-3b-a800m-experts-unchecked")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        every = [name for name in CASES if name != TOO_LARGE]
        metafunc.parametrize("name", every if metafunc.config.getoption("--all") else ON_A_PUSH)


def test_a_model_of_full_size_takes_what_is_predicted(name: str) -> None:
    """Allocated within 0.1 %, reserved within 1.5 %."""
    row = in_own_process(name, None)
    assert row.get("measured"), row
    predicted, measured = row["predicted"], row["measured"]
    assert predicted["allocated"] == pytest.approx(measured["allocated"], rel=0.001)
    assert predicted["reserved"] == pytest.approx(measured["reserved"], rel=0.015)


def test_what_is_predicted_not_to_fit_a_card_of_44_gib_does_not() -> None:
    """Torch's own error, and the benchmark's words for it."""
    row = in_own_process(TOO_LARGE, 44 << 30)
    assert not row["fits"]
    assert row["measured"] is None
    assert "CUDA out of memory" in row["out_of_memory"]["message"]
