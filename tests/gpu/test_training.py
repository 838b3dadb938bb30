"""What only a GPU can show of a run: it learns in bfloat16. A bare GPU machine may lack what reads data."""

from pathlib import Path

import pytest

from moetune.config.load import load_run_config

pytestmark = pytest.mark.gpu
CONFIGS = Path(__file__).parents[2] / "configs"
WAYS = ("router", "experts", "lora")


@pytest.mark.parametrize("way", WAYS)
def test_a_run_in_bfloat16_learns(way: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from tests.resolved import train

    config = load_run_config(CONFIGS / f"tiny-{way}.yaml", [f"output={tmp_path / way}"])
    result = train(config, device="cuda")
    assert result.eval_loss_before is not None
    assert result.eval_loss_after is not None
    assert result.eval_loss_after < result.eval_loss_before - 0.1
