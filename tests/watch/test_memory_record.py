"""Every run leaves predicted beside measured; a prediction that cannot be made ends none."""

import json
from pathlib import Path

import pytest

from moetune.models.catalog.gpus import find_gpu
from moetune.planning.predict import predict
from moetune.run.resolve import resolve
from moetune.training.metrics import Pace
from moetune.watch import memory_record
from moetune.watch.ending import ending
from tests import small
from tests.memory.models import toy_run, write_toy
from tests.resolved import train

Capture = pytest.CaptureFixture[str]


def test_one_figure_is_said_and_it_is_of_the_runs_own_routing(
    configure: small.Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The balanced prediction is in the file; only the one as routed is printed, at the end."""

    def predicted(run: object, card: object, routing: memory_record.AssumedRouting) -> memory_record.Predicted:
        return memory_record.Predicted(2**20 if routing.name == "balanced" else 2**21)

    monkeypatch.setattr(memory_record, "predicted", predicted)
    train(configure("router"), predicts=True)
    assert "predicted" not in capsys.readouterr().err
    record = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert (record["schema"], record["device"], record["steps"]) == (1, "cpu", 2)
    assert record["measured"]["peak_allocated"] > 10_000
    assert record["predicted"] == {"peak_allocated": 2**20, "as_routed": 2**21}
    (line,) = [line for line in ending(tmp_path / "run") if "peak memory" in line]
    assert line.startswith("peak memory: predicted 2.00 MiB for sequences of 64 tokens, measured ")
    assert line.endswith(" with those of the data")  # which are not packed


@pytest.mark.full
def test_what_a_run_does_between_its_steps_is_no_part_of_what_is_compared(
    small_model: Path, small_data: Path, tmp_path: Path
) -> None:
    """The routing of evaluations, samples of weights on the host, calls before the optimizer states exist."""
    train(
        small.run_config(
            small_model, small_data, tmp_path / "run", "experts",
            model={"path": str(small_model), "base": "fp32", "dtype": "fp32"},
            train={"micro_batch": 1, "accumulate": 4, "steps": 2, "sequence_length": 48, "eval_every": 1,
                   "save_every": 1, "router_aux_loss": 0.01, "max_grad_norm": 0.15},
            data={"train": str(small_data), "eval": str(small_data), "packing": True},
        ),
        predicts=True,
    )  # fmt: skip
    record = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert record["measured"]["peak_allocated"] == pytest.approx(record["predicted"]["as_routed"], rel=2e-4)


@pytest.mark.parametrize("error", [ValueError("a layer's tuple"), MemoryError()])
def test_a_prediction_that_fails_ends_no_training(
    error: Exception, configure: small.Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(memory_record, "trace", fails)
    assert train(configure(), predicts=True).steps == 3
    assert "cannot be predicted" in capsys.readouterr().err
    record = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert record["predicted"] == {"peak_allocated": None, "as_routed": None}


def test_a_prediction_does_not_change_what_training_draws(noisy_model: Path, small_data: Path, tmp_path: Path) -> None:
    """Dropout: a trace builds a model, which begins from the seed."""
    model = {"path": str(noisy_model), "base": "fp32", "dtype": "fp32"}
    losses = []
    for predicts in (False, True):
        output = tmp_path / str(predicts)
        train(small.run_config(noisy_model, small_data, output, "router", model=model, train={"steps": 4}),
              predicts=predicts)  # fmt: skip
        losses.append([line["loss"] for line in small.read_metrics(output) if "loss" in line])
    assert losses[0] == losses[1]


def test_operations_are_those_of_a_trace_and_the_limit_the_cards(tmp_path: Path) -> None:
    config = toy_run(write_toy(tmp_path, "mixtral", num_hidden_layers=1), "mixtral", {"router": "all"})
    card, time = find_gpu("h100"), predict(resolve(config, "cuda"), gpu="h100").time
    assert card.bf16 is not None
    assert time is not None
    pace = memory_record.predicted(resolve(config, "cuda"), card).pace
    assert pace == Pace(round(time.flops), card.bf16.value)
    assert memory_record.predicted(resolve(config, "cpu")).pace == Pace()
