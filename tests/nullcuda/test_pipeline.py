"""Each rank of a pipeline takes on the card what is predicted of it, as torch's own allocator counts.

One process is one rank after the other: torch's fake process group sends nothing, and a message is held until it is
waited for, as NCCL holds it.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from moetune.config.load import load_run_config
from moetune.config.schema import RunConfig
from moetune.memory.assumed_routing import BALANCED
from moetune.memory.measurement.measure import catalog_name, measure
from moetune.parallel.join import fake_ranks
from moetune.planning.predict import predict
from moetune.planning.settle import settled
from moetune.run.resolve import resolve
from tests.nullcuda import runs

RECIPE = Path(__file__).parents[2] / "configs" / "mixtral-8x7b-lora-2x24gb.yaml"
PAGES = 22 << 20
"""Bytes of a page of each of the allocator's pools, which a toy does not fill."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"pp": 2},
    "gpipe": {"pp": 2, "schedule": "gpipe", "stages": ["0-2", 3]},
    "interleaved1f1b": {"pp": 2, "schedule": "interleaved1f1b"},
}


def assert_each_rank_takes_what_is_predicted(config: RunConfig, pages: int = 0) -> None:
    """Allocated within 0.1 %, and reserved within 1.5 % or `pages` bytes."""
    card = torch.device("cuda", 0)
    run = settled(resolve(config, "cuda"), catalog_name(card), BALANCED)
    report = predict(run, gpu=catalog_name(card), routing=BALANCED)
    for rank in report.ranks:
        runs.clear()
        allocated, reserved = torch.cuda.memory_allocated(card), torch.cuda.memory_reserved(card)
        with fake_ranks(config.parallel, rank.rank) as ranks:
            measured = measure(run, card, steps=2, ranks=ranks)
        assert measured.peak_reserved is not None
        assert rank.peak_allocated == pytest.approx(measured.peak_allocated - allocated, rel=1e-3), rank.holds
        assert rank.peak_reserved == pytest.approx(measured.peak_reserved - reserved, rel=0.015, abs=pages), rank.holds


ON_A_PUSH = (("1f1b", "lora"), ("gpipe", "router"), ("interleaved1f1b", "experts"))


@pytest.mark.parametrize(
    ("schedule", "adapt"),
    [
        pytest.param(*case, marks=[] if case in ON_A_PUSH else pytest.mark.full)
        for case in product(SCHEDULES, runs.ADAPT)
    ],
)
def test_a_toy(schedule: str, adapt: str, tmp_path: Path) -> None:
    model = runs.write_toy(tmp_path / "model", num_hidden_layers=4)
    train = {"accumulate": 4, "router_aux_loss": 0.01 if adapt == "router" else 0.0}
    parallel = {"parallel": SCHEDULES[schedule], "hardware": {"count": 2}}
    assert_each_rank_takes_what_is_predicted(runs.toy_run(model, adapt, train=train, **parallel), PAGES)


@pytest.mark.full
@pytest.mark.parametrize("settings", [(), ("parallel.schedule=interleaved1f1b", "train.micro_batch=1")])
def test_mixtral_8x7b(settings: tuple[str, ...]) -> None:
    assert_each_rank_takes_what_is_predicted(load_run_config(RECIPE, ["model.weights=random", *settings]))
