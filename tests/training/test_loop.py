"""A run as the run file says: metrics, schedules, clipping, seeds, evaluation, reporters, and what stays untouched."""

import contextlib
import io
import json
import math
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import moetune
from moetune.adapt.build import Adapted
from moetune.adapt.build import build as build_resolved
from moetune.config.load import load_run_config
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.parallel.ranks import Ranks
from moetune.run.resolve import ResolvedRun
from moetune.training import interrupt, run
from moetune.training.folder.checkpoint import parts_of
from moetune.training.folder.run_writer import RunWriter
from moetune.training.interrupt import Interrupted
from moetune.training.loop import Loop
from moetune.training.step import stepper
from moetune.training.step.stepper import Stepper
from moetune.watch.ending import ending
from moetune.watch.memory_record import MemoryRecord
from tests import small
from tests.resolved import build, train
from tests.thinned import thinned

KEYS = [
    "step", "loss", "router_loss", "lr", "grad_norm", "skipped_steps", "tokens_per_second", "flops", "share_of_limit",
    "seconds_left", "peak_allocated", "expert_load", "routing", "idle_experts", "unchanged", "notices",
]  # fmt: skip


def trained(config: RunConfig) -> list[dict[str, Any]]:
    """Trains, and gives the metrics without those that depend on the clock."""
    train(config)
    assert config.output is not None
    return small.metrics_without_times(Path(config.output))


def only_without_weights(resolved: ResolvedRun, device: torch.device | str, *more: Any) -> Adapted:
    """What is checked before a run is checked on the meta device, where nothing is loaded."""
    if torch.device(device).type != "meta":
        pytest.fail("weights were loaded")
    return build_resolved(resolved, device, *more)


def test_metrics_have_the_keys_of_the_contract(small_model: Path, small_data: Path, tmp_path: Path) -> None:
    result = train(small.run_config(small_model, small_data, tmp_path / "run", data={"eval": str(small_data)}))
    lines = small.read_metrics(tmp_path / "run")
    assert [(line["step"], "eval_loss" in line) for line in lines] == [
        (0, True), (1, False), (2, False), (3, False), (3, True)
    ]  # fmt: skip
    for line in (line for line in lines if "loss" in line):
        assert list(line) == KEYS
        assert line["lr"] == 0.01
        assert line["grad_norm"] > 0
        assert line["tokens_per_second"] > 0
        assert line["seconds_left"] >= 0
        assert line["flops"] is line["share_of_limit"] is None  # they are counted for a card
        assert line["peak_allocated"] is None  # a CPU has no such counter
        assert list(line["expert_load"]) == ["max_over_mean", "layer", "unused"]
    assert list(lines[0]) == ["step", "eval_loss", "eval_tokens"]
    assert (result.eval_loss_before, result.eval_loss_after) == (lines[0]["eval_loss"], lines[-1]["eval_loss"])
    assert result.steps == 3


@pytest.mark.gpu
def test_peak_memory_is_in_the_metrics(configure: small.Configure) -> None:
    lines = trained(configure())
    assert all(line["peak_allocated"] > 0 for line in lines)


@pytest.mark.full
@pytest.mark.parametrize("adapt", thinned(small.ADAPT, len(small.ADAPT)))
def test_four_rows_a_step_however_they_are_cut(adapt: str, configure: small.Configure, tmp_path: Path) -> None:
    """4 × 1, 2 × 2 and 1 × 4, over the end of the data, where a step has two rows."""
    runs = {}
    for micro_batch, accumulate in ((4, 1), (2, 2), (1, 4)):
        settings = {"micro_batch": micro_batch, "accumulate": accumulate, "steps": 6, "save_every": 99}
        output = tmp_path / str(micro_batch)
        config = configure(adapt, output=output, train=settings, optimizer={"name": "sgd", "lr": 0.5})
        runs[micro_batch] = (trained(config), load_file(output / "checkpoints" / "step-6" / "trained.safetensors"))
    lines, tensors = runs[4]
    for others, other_tensors in (runs[2], runs[1]):
        for line, other in zip(lines, others, strict=True):
            assert other["loss"] == pytest.approx(line["loss"], rel=1e-5)
            assert other["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-3)
        torch.testing.assert_close(other_tensors, tensors, rtol=1e-4, atol=1e-5)
    places = parts_of(build(config, "meta"))
    assert tensors.keys() == {part.name for parts in places.values() for part in parts}


def test_evaluation_does_not_depend_on_its_batches(small_model: Path, small_data: Path, tmp_path: Path) -> None:
    losses = []
    for rows in (None, 5, 64):
        settings = {"steps": 1, "eval_micro_batch": rows}
        output = tmp_path / str(rows)
        lines = trained(
            small.run_config(small_model, small_data, output, train=settings, data={"eval": str(small_data)})
        )
        losses.append((lines[0]["eval_loss"], lines[-1]["eval_loss"]))
        assert lines[0]["eval_tokens"] == lines[-1]["eval_tokens"] > 100
    for before, after in losses:
        assert before == pytest.approx(losses[0][0], rel=1e-6)
        assert after == pytest.approx(losses[0][1], rel=1e-6)


SCHEDULES = {
    "constant": lambda step: 1.0,
    "linear": lambda step: (10 - step) / 8,
    "cosine": lambda step: (1 + math.cos(math.pi * (step - 2) / 8)) / 2,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_and_schedule(schedule: str, configure: small.Configure) -> None:
    settings = {"steps": 10, "warmup": 2, "schedule": schedule, "save_every": 99, "micro_batch": 1, "accumulate": 1}
    lines = trained(configure(train=settings))
    expected = [0.01 * (step / 2 if step < 2 else SCHEDULES[schedule](step)) for step in range(10)]
    assert [line["lr"] for line in lines] == pytest.approx(expected)


def test_clipping_acts(configure: small.Configure, tmp_path: Path) -> None:
    """With plain SGD the first step is lr × gradient: its length is lr × the norm that is left."""
    moved, norms = {}, {}
    for limit in (0.0, 1e9, 0.01):
        config = configure(
            "experts",
            output=str(limit),
            train={"steps": 1, "max_grad_norm": limit},
            optimizer={"name": "sgd", "lr": 0.5},
        )
        start = {name: parameter.detach().clone() for name, parameter in build(config, "cpu").trainable().items()}
        norms[limit] = trained(config)[0]["grad_norm"]
        end = load_file(tmp_path / str(limit) / "checkpoints" / "step-1" / "trained.safetensors")
        moved[limit] = torch.cat([(end[name] - start[name]).flatten() for name in start]).norm().item()
    assert norms[0.0] == norms[1e9] == norms[0.01] > 0.1  # logged as it was before
    assert moved[0.0] == moved[1e9] == pytest.approx(0.5 * norms[0.0], rel=1e-4)
    assert moved[0.01] == pytest.approx(0.5 * 0.01, rel=1e-3)


def test_the_seed_orders_the_data(configure: small.Configure) -> None:
    """The first loss of untouched weights, with nothing random in the model: a matter of which rows come first."""
    losses = []
    for seed in (1, 2):
        config = configure(output=str(seed), train={"steps": 1, "seed": seed})
        losses.append(trained(config)[0]["loss"])
    assert losses[0] != losses[1]


def test_frozen_weights_stay_as_they_are(
    small_model: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every parameter and buffer of the model, packed bytes and scales included, but for those that train."""
    seen: list[tuple[Adapted, dict[str, torch.Tensor]]] = []

    def watched_build(resolved: ResolvedRun, device: torch.device | str, *more: Any) -> Adapted:
        adapted = build_resolved(resolved, device, *more)
        if adapted.model.device.type == "meta":  # what is checked before any weight is read
            return adapted
        seen.append((adapted, {name: tensor.clone() for name, tensor in adapted.model.state_dict().items()}))
        return adapted

    monkeypatch.setattr(run, "build", watched_build)
    train(small.run_config(small_model, small_data, tmp_path / "run", "experts", data={"eval": str(small_data)}))
    ((adapted, before),) = seen
    after = adapted.model.state_dict()
    assert any(tensor.dtype == torch.uint8 for tensor in before.values())
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == adapted.trainable().keys()


def test_tensorboard_gets_the_same_numbers(configure: small.Configure, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings = {"report_to": ["tensorboard"]}
    lines = trained(configure(train=settings))
    (events,) = (tmp_path / "run" / "runs" / "moetune").glob("events.out.tfevents.*")
    reader = accumulator.EventAccumulator(str(events.parent))
    reader.Reload()
    logged = [(event.step, event.value) for event in reader.Scalars("train/loss")]
    assert logged == [(line["step"], pytest.approx(line["loss"], rel=1e-6)) for line in lines]
    assert "train/expert_load_max_over_mean" in reader.Tags()["scalars"]


@pytest.mark.parametrize(
    ("reporter", "message"),
    [
        ("tensorbord", r"train.report_to: 'tensorbord' is not a reporter. Did you mean 'tensorboard'\?"),
        ("printer", r"'printer' is not a reporter. There are: .*wandb"),
        ("wandb", r"'wandb' cannot be used: its package is not installed"),
    ],
)
def test_an_unknown_reporter_is_refused_first(
    reporter: str, message: str, configure: small.Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "build", only_without_weights)
    with pytest.raises(UserError, match=message):
        train(configure(train={"report_to": [reporter]}))
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_loads_and_writes_nothing(
    configure: small.Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "build", only_without_weights)
    result = train(configure(), dry_run=True)
    assert (result.steps, result.trainable["router"]) == (0, small.LAYERS * small.EXPERTS * 64)
    assert list(tmp_path.iterdir()) == []


def test_a_logged_loss_covers_every_step_since_the_last(configure: small.Configure) -> None:
    """Also before a checkpoint that falls between: the sum so far is not in one, so it is logged there."""
    each = trained(configure(output="1", train={"steps": 7, "save_every": 3}))
    settings = {"steps": 7, "save_every": 3, "log_every": 5}
    some = trained(configure(output="5", train=settings))
    losses = [line["loss"] for line in each]
    assert [line["step"] for line in some] == [3, 5, 6, 7]
    expected = [sum(losses[:3]) / 3, sum(losses[3:5]) / 2, losses[5], losses[6]]
    assert [line["loss"] for line in some] == pytest.approx(expected, rel=1e-6)


def test_a_checkpoint_takes_what_is_asked_of_the_disk(
    configure: small.Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Master weights included: what is written is never more, and not a third less."""
    asked: list[int] = []
    new_checkpoint = RunWriter.new_checkpoint
    monkeypatch.setattr(
        RunWriter,
        "new_checkpoint",
        lambda self, step, keep, needed, best: (asked.append(needed), new_checkpoint(self, step, keep, needed))[1],
    )
    sections = {"optimizer": {"name": "adamw", "offload": True}, "train": {"save_every": 3}}
    train(configure("experts", **sections))
    inside = (tmp_path / "run" / "checkpoints" / "step-3").rglob("*")
    written = sum(file.stat().st_size for file in inside if file.is_file())
    assert asked[0] - 2**20 <= written <= asked[0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_the_step_which_is_saved(
    number: signal.Signals, configure: small.Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that Python drops, as in a destructor; more within a second are the same one."""
    step, said = MemoryRecord.step_ends, io.StringIO()

    def interrupted(self: MemoryRecord) -> None:
        step(self)
        if self.loop.step == 2:
            with contextlib.suppress(BaseException):
                signal.raise_signal(number)
                signal.raise_signal(number)

    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    run = configure("lora", train={"steps": 5})
    whole = run.model_copy(update={"output": str(tmp_path / "whole")})
    monkeypatch.setattr(MemoryRecord, "step_ends", interrupted)
    with pytest.raises(Interrupted) as ended:
        train(run, console=Console(file=said, width=500))
    monkeypatch.setattr(MemoryRecord, "step_ends", step)
    assert ended.value.number == number
    assert f"{number.name}: step 2 is saved in {tmp_path / 'run/checkpoints/step-2'}" in said.getvalue()
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before
    train(run, resume="auto")
    assert trained(whole) == small.metrics_without_times(tmp_path / "run")


def test_after_a_signal_ranks_wait_for_the_first_to_name_the_checkpoint(
    configure: small.Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a rank ends, the launcher stops those that do not end soon."""
    happened: list[str] = []
    step, save = MemoryRecord.step_ends, Loop._save
    monkeypatch.setattr(MemoryRecord, "step_ends", lambda self: (step(self), signal.raise_signal(signal.SIGINT)))
    monkeypatch.setattr(Loop, "_save", lambda self: (save(self), happened.append("saved")))
    monkeypatch.setattr(Ranks, "barrier", lambda _: happened.append("waited"))
    console = Console(file=io.StringIO())
    monkeypatch.setattr(console, "print", lambda text: happened.append(text))
    with pytest.raises(Interrupted):
        train(configure(train={"steps": 5}), console=console)
    assert happened[-3:-1] == ["saved", "waited"]
    assert "step 1 is saved in" in happened[-1]


def test_a_second_signal_ends_it_at_once(
    configure: small.Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupt, "_SAME", -1.0)
    monkeypatch.setattr(MemoryRecord, "step_begins", lambda _: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
    with pytest.raises(KeyboardInterrupt) as ended:
        train(configure(train={"steps": 5}))
    assert not isinstance(ended.value, Interrupted)
    assert not (tmp_path / "run/checkpoints/step-1").exists()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("steps", [1, 3])
def test_weights_that_the_last_update_broke_are_not_kept(
    steps: int, configure: small.Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No gradient since could have told."""
    update = Stepper.update

    def breaks(self: Stepper, reduced: Any) -> None:
        update(self, reduced)
        if reduced.norm is not None and len(list((tmp_path / "run/checkpoints").iterdir())) == steps - 1:
            with torch.no_grad():
                next(iter(self.adapted.trainable().values())).view(-1)[-1] = math.nan

    monkeypatch.setattr(Stepper, "update", breaks)
    said = rf"step {steps}: .*model.layers.0\S* not finite.*" + ("none before" if steps == 1 else f"step-{steps - 1}")
    with pytest.raises(UserError, match=said):
        train(configure(train={"steps": steps, "save_every": 1}))
    assert len(list((tmp_path / "run/checkpoints").glob("*"))) == steps - 1


def test_a_path_trains(small_model: Path, small_data: Path, tmp_path: Path) -> None:
    raw = small.run_file(small_model, small_data, tmp_path / "run", train={"steps": 1})
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(raw))
    assert moetune.train(file, dry_run=True) == moetune.train(str(file), dry_run=True)
    assert moetune.train(RunConfig.model_validate(raw), dry_run=True).output == raw["output"]


def test_epochs_become_steps_and_resume_as_such(small_model: Path, small_data: Path, tmp_path: Path) -> None:
    run = small.run_file(small_model, small_data, tmp_path / "run")
    run["train"] = {name: value for name, value in run["train"].items() if name != "steps"} | {"epochs": 1.5}
    result = train(RunConfig.model_validate(run))
    an_epoch = -(-len(small.DATA) // 4)
    assert result.steps == -(-3 * an_epoch // 2)
    kept = load_run_config(tmp_path / "run" / "run.yaml").train
    assert (kept.steps, kept.epochs) == (result.steps, None)
    assert train(RunConfig.model_validate(run), resume="auto").steps == result.steps
    run["train"]["steps"] = 3
    with pytest.raises(ValueError, match="leave one out"):
        RunConfig.model_validate(run)


def test_what_is_known_of_the_length_is_said(configure: small.Configure) -> None:
    said = io.StringIO()
    config = configure(train={"steps": 50, "warmup": 50})
    train(config, dry_run=True, console=Console(file=said, soft_wrap=True))
    lines = said.getvalue().splitlines()
    assert lines[1].startswith("data: 14 examples in 14 sequences, ")
    assert lines[2:] == [
        "length: 50 steps of 4 an epoch, 12.5 epochs",
        "warning: every example is seen 12 times; train.steps=4 would be once",
        "warning: train.warmup: 50 is never over, so optimizer.lr is not reached",
    ]


@pytest.mark.parametrize(("lr", "low", "high"), [(1e-2, 0.5, 1.0), (2e-5, 0.001, 0.4)])
def test_weights_that_do_not_move_are_said(lr: float, low: float, high: float, configure: small.Configure) -> None:
    said = io.StringIO()
    config = configure(
        model={"dtype": "bf16", "base": "bf16"},
        optimizer={"name": "adamw", "lr": lr},
        train={"steps": 2, "sequence_length": 16},
        data={"too_long": "truncate"},
    )
    train(config, console=Console(file=said, width=500))
    found = re.search(r"note: (\S+)% of the weights that train in 16 bits have moved", said.getvalue())
    assert (found is not None) == (high < 0.5)
    assert found is None or low <= float(found[1]) / 100 <= high


def test_early_stopping_keeps_and_exports_the_best(
    configure: small.Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = small.write_data(tmp_path / "held_out.jsonl", [{"prompt": "x y z", "completion": "q w v u, 0 1 2 3"}])
    settings = {
        "steps": 40,
        "eval_every": 1,
        "save_every": 40,
        "keep_checkpoints": 1,
        "early_stopping": {"patience": 3},
    }
    sections: dict[str, Any] = {
        "train": settings, "data": {"eval": str(held_out)}, "optimizer": {"name": "adamw", "lr": 0.05},
    }  # fmt: skip
    config = configure("experts", **sections)
    lines = trained(config)
    losses = {line["step"]: line["eval_loss"] for line in lines if line.get("eval_loss") and line["step"]}
    best, last = min(losses, key=lambda step: losses[step]), max(losses)
    assert last == best + 3 < 40
    assert [path.name for path in RunWriter(tmp_path / "run").checkpoints()] == [f"step-{best}", f"step-{last}"]

    exported = moetune.export(tmp_path / "run", "delta", tmp_path / "delta")
    assert (exported.step, exported.notes[0].split(",")[0]) == (best, f"taking step-{best}")
    assert train(config, resume="auto").steps == last
    assert "train.early_stopping.patience" in capsys.readouterr().err

    shutil.rmtree(tmp_path / "run/checkpoints" / f"step-{last}")
    assert train(config, resume="auto").steps == last  # what follows the best runs again, and ends as before
    assert small.metrics_without_times(tmp_path / "run") == lines


def test_a_held_out_loss_that_is_not_finite_is_null_and_never_the_best(
    small_model: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, said = iter([1.0, math.nan, 5.0, math.inf, math.nan]), io.StringIO()
    monkeypatch.setattr(stepper, "held_out_loss", lambda *_: (torch.tensor(next(losses)), torch.tensor(1)))
    settings = {"steps": 9, "eval_every": 1, "eval_micro_batch": 64, "early_stopping": {"patience": 2}}
    config = small.run_config(small_model, small_data, tmp_path / "run", train=settings, data={"eval": str(small_data)})
    result = train(config, console=Console(file=said, width=500))
    lines = small.read_metrics(tmp_path / "run")
    assert [line["eval_loss"] for line in lines if "eval_loss" in line] == [1.0, None, 5.0, None, None]
    assert (result.steps, result.eval_loss_before, result.eval_loss_after) == (4, 1.0, None)
    assert "step 4: held-out loss not finite" in said.getvalue()
    assert "best held-out loss 1.0000, at step 0" in ending(tmp_path / "run")
    assert [path.name for path in RunWriter(tmp_path / "run").checkpoints()] == ["step-2", "step-4"]
    assert train(config, resume="auto").steps == 4
