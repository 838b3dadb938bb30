"""A run whose memory ends: it says what was there and what would have fitted, or continues with smaller micro-batches.

The device is a tracker with a limit, which raises torch's own error.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moetune.config.load import read_run_config
from moetune.config.schema import RunConfig
from moetune.errors import DoesNotFit, UserError
from moetune.memory.measurement.live import LiveStorage, Refused
from moetune.memory.report import PartName
from moetune.memory.trace.tracker import Tracker
from moetune.models.catalog.gpus import Figure, find_gpu
from moetune.planning.savings import is_setting_of_host
from moetune.run.resolve import resolve
from moetune.training import loop
from moetune.training.folder.run_folder import RunFolder
from moetune.watch import memory_record, out_of_memory
from moetune.watch.train import Watch
from tests import small
from tests.resolved import train
from tests.thinned import thinned

Limited = Callable[..., int]

ROWS = {"micro_batch": 4, "accumulate": 2, "steps": 3, "save_every": 1, "max_grad_norm": 0.5}
HALVES = {**ROWS, "micro_batch": 2, "accumulate": 4}


class SmallDevice(Tracker):
    """A device of so many bytes; None: of any number."""

    def __init__(self, modules: dict[torch.nn.Module, str], limit: int | None) -> None:
        super().__init__(modules)
        self.limit, self.taken = limit, 0
        self.refused: Refused | None = None

    def birth(self, size: int, part: PartName, op: str, *, on_host: bool = False) -> int:
        wanted = 0 if on_host else size
        if self.limit is not None and self.taken + wanted > self.limit:  # some of it may have moved to the host
            alive = {n: b for n, b in enumerate(self.log.blocks) if b.died is None and not b.on_host}
            self.taken = sum(block.bytes for block in alive.values())
            if self.taken + wanted > self.limit:
                storages = {n: LiveStorage(b.bytes, f"{b.op} in {b.module}") for n, b in alive.items()}
                self.refused = Refused(size, self.taken, self.limit, storages, self.block_of)
                raise torch.OutOfMemoryError(op)
        self.taken += wanted
        return super().birth(size, part, op, on_host=on_host)

    def death(self, number: int) -> None:
        super().death(number)
        block = self.log.blocks[number]
        self.taken -= 0 if block.on_host or block.died is None else block.bytes


def limit_to(limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(record: memory_record.MemoryRecord) -> Refused | None:
        record._tracking.close()
        assert isinstance(record._tracker, SmallDevice)
        return record._tracker.refused

    monkeypatch.setattr(memory_record, "Tracker", lambda modules: SmallDevice(modules, limit))
    monkeypatch.setattr(memory_record.MemoryRecord, "refused", refused)


@pytest.fixture
def no_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what would have fitted, which takes longer than the training."""
    monkeypatch.setattr(out_of_memory, "remedies", lambda *_: [])


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Limited:
    """Trains on a device of so many bytes; returns the most that was alive."""
    monkeypatch.setattr(memory_record, "MEASURED_STEPS", 10**9)  # so that the tracker is there in all of them

    def run(config: RunConfig, limit: int | None, **options: Any) -> int:
        limit_to(limit, monkeypatch)
        train(config, measures=True, **options)
        return json.loads((Path(str(config.output)) / "memory.json").read_text())["measured"]["peak_allocated"]

    return run


def lines(output: Path) -> list[dict[str, Any]]:
    """Metrics of steps, without those that are times."""
    return [line for line in small.metrics_without_times(output) if "loss" in line]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "experts, states on the host": ("experts", {"optimizer": {"name": "adamw", "offload": True}}),
    "lora, all on the host": ("lora", {"model": {"experts_on": "host"}, "train": {"checkpointing": "offload"}}),
    "routers, all kept": ("router", {"train": {"checkpointing": "none"}}),
}


@pytest.mark.full
@pytest.mark.parametrize("case", thinned(CASES, every=3))
def test_the_run_goes_on_as_one_of_half_the_micro_batch(
    case: str, limited: Limited, noisy_model: Path, small_data: Path, tmp_path: Path
) -> None:
    """Losses, norms, routing and weights, bit for bit, under dropout and jitter; resumed without a limit too."""
    adapt, sections = CASES[case]

    def config(name: str, train: dict[str, Any]) -> RunConfig:
        more = {**sections, "train": train | sections.get("train", {})}
        return small.run_config(noisy_model, small_data, tmp_path / name, adapt, **more)

    reference = config("reference", HALVES)
    peak = limited(reference, None)
    whole = config("whole", ROWS | {"on_oom": "halve_micro_batch"})
    limited(whole, peak + 4096)
    assert_same(whole, reference)
    (noted,) = [line for line in small.read_metrics(tmp_path / "whole") if "out_of_memory" in line]
    assert (noted["step"], noted["micro_batch"], noted["accumulate"]) == (1, 2, 4)
    limited(whole, None, resume=str(tmp_path / "whole/checkpoints/step-2"))
    assert_same(whole, reference)


def assert_same(run: RunConfig, reference: RunConfig) -> None:
    one, other = Path(str(run.output)), Path(str(reference.output))
    assert lines(one) == lines(other)
    mine, its = (load_file(folder / "checkpoints/step-3/trained.safetensors") for folder in (one, other))
    assert mine.keys() == its.keys()
    assert all(mine[name].equal(its[name]) for name in mine)


def full_rows(model: Path, output: Path, *settings: str) -> RunConfig:
    """A run whose sequences are all as long as predictions assume."""
    text = "a router sends every token of the text " * 9
    data = small.write_data(output.with_suffix(".jsonl"), [{"text": text}] * 8)
    raw = small.run_file(model, data, output, "lora", train=ROWS, data={"packing": True})
    return read_run_config(raw, settings, "run")


@pytest.mark.usefixtures("no_remedies")
def test_it_says_what_was_there(limited: Limited, small_model: Path, tmp_path: Path) -> None:
    """The last checkpoint is whole, and the run goes on from it."""
    peak = limited(full_rows(small_model, tmp_path / "before"), None)
    with pytest.raises(DoesNotFit) as ended:
        limited(full_rows(small_model, tmp_path / "failed"), peak - 1)
    found = ended.value.found["out_of_memory"]
    assert found["available_bytes"] == peak - 1
    assert found["allocated_bytes"] + found["wanted_bytes"] == peak
    assert found["actual"]["allocated"] == found["allocated_bytes"]
    assert sum(found["actual"].values()) == 2 * found["allocated_bytes"]
    for part in ("frozen_weights", "trainable_weights", "optimizer_states", "gradients"):
        assert found["actual"][part] == found["predicted"][part] > 0
    assert found["predicted"]["allocated"] == found["predicted_peak_allocated"] == pytest.approx(peak, rel=0.01)
    assert found["largest"][0]["bytes"] >= found["largest"][-1]["bytes"] > 0
    where = f"step {found['step']}, micro-step {found['micro_step']}, {found['phase']}"
    assert str(ended.value).startswith(f"out of memory in {where}:")
    assert json.loads((tmp_path / "failed/out_of_memory.json").read_text()) == ended.value.found

    last = RunFolder(tmp_path / "failed").newest_whole()
    assert last is not None
    assert str(last) == ended.value.found["last_checkpoint"]
    goes_on = full_rows(small_model, tmp_path / "failed", "train.on_oom=halve_micro_batch")
    limited(goes_on, peak - 1, resume="auto")
    for mine, its in zip(lines(tmp_path / "failed"), lines(tmp_path / "before"), strict=True):
        assert mine["loss"] == pytest.approx(its["loss"], rel=1e-5)


@pytest.mark.full  # many kinds of runs are recorded
def test_with_what_it_names_the_run_fits(limited: Limited, small_model: Path, tmp_path: Path) -> None:
    peak = limited(full_rows(small_model, tmp_path / "before"), None)
    with pytest.raises(DoesNotFit) as ended:
        limited(full_rows(small_model, tmp_path / "failed"), peak - 1)
    settings = ended.value.found["out_of_memory"]["settings"]
    assert any(one["flags"][0].startswith("train.micro_batch=") for one in settings)
    for number, remedy in enumerate(settings):
        assert " ".join(f"--set {flag}" for flag in remedy["flags"]) in str(ended.value)
        mended = full_rows(small_model, tmp_path / f"mended-{number}", *remedy["flags"])
        assert limited(mended, peak - 1) < peak


@pytest.mark.usefixtures("no_remedies")
def test_one_row_is_not_halved(limited: Limited, configure: small.Configure, tmp_path: Path) -> None:
    """Three rows become one each; then there is no more to be had."""
    train = ROWS | {"micro_batch": 3, "on_oom": "halve_micro_batch"}
    run = configure("lora", train=train)
    with pytest.raises(DoesNotFit, match="out of memory in step 1, micro-step 0, forward"):
        limited(run, 1_270_000)
    (noted,) = [line for line in small.read_metrics(tmp_path / "run") if "out_of_memory" in line]
    assert (noted["micro_batch"], noted["accumulate"]) == (1, 6)


@pytest.mark.usefixtures("no_remedies")
def test_the_command_exits_with_one(
    moetune: Callable[..., Any], small_model: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(small.run_file(small_model, small_data, tmp_path / "run", "router", train=ROWS)))
    limit_to(1_500_000, monkeypatch)
    monkeypatch.setattr(memory_record, "predicted", lambda *_: memory_record.Predicted())
    ended = moetune("train", file, "--json")
    assert ended.code == 1
    found = json.loads(ended.out)
    assert (found["schema"], found["out_of_memory"]["phase"], found["last_checkpoint"]) == (1, "forward", None)
    assert "error: out of memory in step 1, micro-step 0, forward" in ended.err
    assert "Traceback" not in ended.err


def test_memory_that_runs_out_as_the_optimizer_is_made_is_reported(
    configure: small.Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Any) -> None:
        raise torch.OutOfMemoryError("of copies of the weights")

    monkeypatch.setattr(loop, "make_optimizer", full)
    monkeypatch.setattr(Watch, "out_of_memory", lambda self, run, loop: DoesNotFit("a report", {"loop": loop}))
    with pytest.raises(DoesNotFit, match="a report"):
        train(configure())
    assert json.loads((tmp_path / "run/out_of_memory.json").read_text()) == {"loop": None}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"optimizer": {"name": "lomo"}, "train": {"accumulate": 1}}, "fused_backward has updated weights"),
        ({"parallel": {"fsdp": 2}}, "halve_micro_batch is for one GPU"),
    ],
)
def test_what_cannot_be_halved_is_refused(sections: dict[str, Any], said: str, configure: small.Configure) -> None:
    more = {**sections, "train": {"on_oom": "halve_micro_batch", **sections.get("train", {})}}
    with pytest.raises(UserError, match=said):
        train(configure("experts", **more))


@pytest.mark.full
@pytest.mark.parametrize(
    ("room", "is_named"), [pytest.param(None, True, marks=pytest.mark.full), (10**12, True), (0, False)]
)
def test_offload_needs_room_on_the_host(
    room: int | None, is_named: bool, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out_of_memory, "this_machine", lambda: None if room is None else Figure(room, "there"))
    run = resolve(small.run_config(small_model, tmp_path / "data.jsonl", tmp_path / "out", "experts"), "cuda")
    found = out_of_memory.remedies(run, find_gpu("l40s"), 2**16)
    on_host = [key for one in found for key, value in one.settings.items() if is_setting_of_host(key, value)]
    assert found
    assert bool(on_host) == is_named, found
