"""Host memory: how much there is, how much a run takes, and that no verdict and no plan forgets it."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetune.config.schema import HardwareConfig
from moetune.memory import host
from moetune.memory.host import ON_CUDA, HostMemory, host_of, process_here, this_machine
from moetune.models.catalog.gpus import Figure, find_gpu
from moetune.planning.fit import surely_left
from moetune.planning.plan import plan
from moetune.planning.predict import predict
from moetune.planning.predictor import Predictor
from moetune.planning.solve import headroom, solve
from moetune.planning.views import missed
from tests.memory.models import toy_run, write_toy
from tests.report.sample import sample

GIB, MIB = 2**30, 2**20
LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}}


def test_this_process_and_this_machine() -> None:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert 100 * MIB < process_here() < 2 * resident + host.FIRST_USE
    room = this_machine()
    assert room is not None
    assert 0 < room.value <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_container_may_have_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(f"{64 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{48 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"inactive_file {8 * MIB}\nactive_file {4 * MIB}\n")  # given back when wanted
    monkeypatch.setattr(host, "_LIMITS", ((tmp_path, "memory.max", "memory.current"),))
    assert this_machine() == Figure(28 * MIB, "free in this container now", measured_here=True)
    (tmp_path / "memory.max").write_text("max\n")
    room = this_machine()
    assert room is not None
    assert room.source == "free on this machine now"


def test_whose_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run file's; else that of the machine whose card is meant; of a card elsewhere nothing is known."""
    here = Figure(5 * GIB, "here")
    monkeypatch.setattr(host, "this_machine", lambda: here)
    card = find_gpu("l40s")
    elsewhere = host_of(HardwareConfig(), card, 10 * GIB, 9 * GIB, 2)
    assert (elsewhere.room, elsewhere.process) == (None, ON_CUDA.value)
    assert elsewhere.required == 2 * (ON_CUDA.value + 10 * GIB)
    assert elsewhere.span.high == elsewhere.required + 2 * GIB
    at_hand = host_of(HardwareConfig(), replace(card, host=here), 10 * GIB, 0)
    assert (at_hand.room, at_hand.process) == (here, process_here())
    given = host_of(HardwareConfig(host_memory="6GiB"), replace(card, host=here), 10 * GIB, 0)
    assert given.room == Figure(6 * GIB, "hardware.host_memory")
    assert host_of(HardwareConfig(), None, 0, 0) == HostMemory(process_here(), 0, 0, room=here)


@pytest.mark.full
def test_a_run_that_only_its_host_cannot_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "this_machine", lambda: Figure(1, "never asked for a card elsewhere"))
    folder = write_toy(tmp_path, "mixtral", num_hidden_layers=2)
    config = toy_run(folder, "mixtral", LORA, model={"experts_on": "host"})
    unknown = predict(config, gpu="44GiB")
    assert unknown.host is not None
    assert (unknown.verdict, unknown.host.room, unknown.host.pinned) == ("yes", None, unknown.fullest.host_bytes)
    assert unknown.host.tensors == max(unknown.load.host, unknown.fullest.host_bytes) > 0
    for size, verdict in ((unknown.host.span.low - 1, "no"), (unknown.host.span.low, "tight"), (4 * GIB, "yes")):
        changed = config.but(hardware={"host_memory": f"{size}B"})
        report = predict(changed, gpu="44GiB")
        assert (report.verdict, report.card_verdict, report.changes) == (verdict, "yes", ())
        assert report.to_json()["host"]["available"] == "hardware.host_memory"


def test_a_search_counts_what_is_left_of_either() -> None:
    """What plans and solutions leave free is that of the card or of the host, whichever is less."""
    report = sample()
    on_card = (report.headroom_bytes, report.least_headroom)
    of = HostMemory(process=GIB, driver=GIB, tensors=GIB)
    unknown, roomy, small = (
        replace(report, host=replace(of, room=room))
        for room in (None, Figure(10**12, "large"), Figure(2 * GIB - 1, "small"))
    )
    for one in (report, unknown, roomy):
        assert (headroom(one), surely_left(one)) == on_card
    assert (headroom(small), surely_left(small)) == (-1, -1 - GIB)


@pytest.mark.full
def test_a_plan_for_a_host(tmp_path: Path) -> None:
    folder, enough = write_toy(tmp_path, "mixtral", num_hidden_layers=2), (ON_CUDA.most or 0) + GIB
    found = plan(str(folder), "24GiB", goals=["router"], host=enough)
    assert found.candidates
    assert all(one.report.host_verdict == "yes" for one in found.candidates)
    assert found.candidates[0].config.hardware.host_memory == f"{enough}B"
    card = replace(find_gpu("24GiB"), host=Figure(ON_CUDA.value // 2, "here"))
    assert solve(toy_run(folder, "mixtral", LORA), "adapt.lora.rank", Predictor(card)).report is None
    none = plan(str(folder), card, goals=["router"])
    assert not none.candidates
    assert none.miss is not None
    assert none.miss.report.host_verdict == "no"
    assert "too much on the host" in " ".join(missed(none))
