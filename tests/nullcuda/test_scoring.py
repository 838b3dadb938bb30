"""Scoring on CUDA takes what is predicted, as torch's allocator counts, and asks the device for little."""

from pathlib import Path

import pytest
import torch

from moetune.memory.measurement.measure import catalog_name
from moetune.planning.predict import predict
from moetune.routing.memory import predict_score
from moetune.routing.score import to_score
from moetune.run.resolve import resolve
from tests.nullcuda import device, runs
from tests.routing.measured import measure_score


@pytest.mark.parametrize(("adapt", "residence"), [("router", "gpu"), ("lora", "host")])
def test_scoring_takes_what_is_predicted(adapt: str, residence: str, toy_model: Path) -> None:
    """Within a block, and less than training."""
    train = {"sequence_length": 1024, "micro_batch": 4}
    run = resolve(to_score(runs.toy_run(toy_model, adapt, model={"experts_on": residence}, train=train)), "cuda")
    card = torch.device("cuda", 0)
    before, asked = torch.cuda.memory_allocated(card), device.asked()
    measure_score(run, card, sources=2)
    measured = torch.cuda.max_memory_allocated(card) - before
    assert (device.asked() - asked).launches > 0
    predicted = predict_score(run, 2, gpu=catalog_name(card)).fullest
    assert 0 <= predicted.peak_allocated - measured <= 512  # how many batches were read is a number on the host
    trained = predict(run, gpu=catalog_name(card)).fullest
    assert predicted.peak_allocated < trained.peak_allocated
