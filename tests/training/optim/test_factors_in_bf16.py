"""LoRA factors in bfloat16, rounded stochastically, learn what float32 factors do."""

from pathlib import Path
from statistics import fmean

import pytest

from moetune.config.load import load_run_config
from tests import small
from tests.resolved import train

SEEDS = range(5)


def last_loss(dtype: str, seed: int, folder: Path) -> float:
    """The mean loss of the last twenty of 200 steps on tiny-mixtral."""
    config = load_run_config(
        Path(__file__).parents[3] / "configs" / "tiny-lora.yaml",
        [
            f"adapt.lora.dtype={dtype}", f"train.seed={seed}", f"output={folder}", "train.steps=200", "data.eval=null",
            "train.micro_batch=2", "train.sequence_length=128", "train.save_every=200", "adapt.lora.rank=8",
        ],
    )  # fmt: skip
    train(config, device="cpu")
    return fmean(line["loss"] for line in small.read_metrics(folder)[-20:])


@pytest.mark.full
def test_200_steps_end_within_the_spread_of_five_seeds_in_float32(tmp_path: Path) -> None:
    exact, rounded = (
        [last_loss(dtype, seed, tmp_path / f"{dtype}-{seed}") for seed in SEEDS] for dtype in ("fp32", "bf16")
    )
    assert min(exact) <= fmean(rounded) <= max(exact)
    spread = max(exact) - min(exact)
    assert max(abs(a - b) for a, b in zip(exact, rounded, strict=True)) <= spread
