"""TRL's trainers on CUDA take what is predicted, as torch's allocator counts."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from moetune.memory.assumed_routing import BALANCED
from moetune.memory.commands.trl import predict_trl
from moetune.memory.measurement.measure import catalog_name
from moetune.run.resolve import resolve
from tests.nullcuda import runs
from tests.nullcuda.trl import measured
from tests.toys import toy_config
from tests.training.test_trl import LAYERS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("dpo", "lora"),
        *(pytest.param(kind, "experts", marks=pytest.mark.full) for kind in ("sft", "dpo", "kto", "orpo")),
        *(pytest.param(kind, "router", marks=pytest.mark.full) for kind in ("dpo", "orpo")),
    ],
)
def test_a_trainer_takes_what_is_predicted(kind: Any, part: str, toy_model: Path, tmp_path: Path) -> None:
    run = resolve(runs.toy_run(toy_model, part, train={"sequence_length": 512}), "cuda")
    more = {"precompute_ref_log_probs": False} if kind in ("dpo", "kto") else {}
    card = torch.device("cuda", 0)
    predicted = predict_trl(run, kind, more, gpu=catalog_name(card), routing=BALANCED).fullest
    assert predicted.peak_allocated == pytest.approx(measured(run, kind, more, tmp_path), rel=0.03)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("part", "train", "more", "fullest"),
    [
        ("lora", {}, {"beta": 0.1}, "generation"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                ("experts", {}, {"beta": 0.1}, "generation"),
                ("router", {}, {"num_iterations": 2}, "generation"),
                ("lora", {}, {"cache_implementation": "static"}, "generation"),
                ("experts", {"sequence_length": 64, "micro_batch": 16, "accumulate": 1}, {}, "backward"),
            ]
        ),
    ],
)
def test_generating_and_training_takes_what_is_predicted(
    part: str, train: dict[str, Any], more: dict[str, Any], fullest: str, toy_model: Path, tmp_path: Path
) -> None:
    train = {"sequence_length": 512, "micro_batch": 1, "accumulate": 8} | train
    run = resolve(runs.toy_run(toy_model, part, train=train), "cuda")
    more = {"max_completion_length": 24, **more}
    report = predict_trl(run, "grpo", more, gpu=catalog_name(torch.device("cuda", 0)), routing=BALANCED)
    assert max(report.phases, key=lambda one: one[1])[0] == fullest
    found = measured(run, "grpo", more, tmp_path)
    print(part, report.phases, report.fullest.peak_allocated / found - 1)
    assert report.fullest.peak_allocated == pytest.approx(found, rel=0.03)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", LAYERS)
def test_a_hybrid_takes_what_is_predicted(model_type: str, tmp_path: Path) -> None:
    toy_config(model_type, num_hidden_layers=2, **LAYERS[model_type]).save_pretrained(tmp_path / "toy")
    train = {"sequence_length": 512, "micro_batch": 1, "accumulate": 8}
    run = resolve(runs.toy_run(tmp_path / "toy", "lora", train=train, model={"base": "bf16"}), "cuda")
    more = {"max_completion_length": 24, "beta": 0.1}
    report = predict_trl(run, "grpo", more, gpu=catalog_name(torch.device("cuda", 0)), routing=BALANCED)
    assert report.fullest.peak_allocated == pytest.approx(measured(run, "grpo", more, tmp_path), rel=0.03)
