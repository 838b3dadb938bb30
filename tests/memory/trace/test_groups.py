"""Groups of experts that are alike are computed once, and the log is that of computing them all."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from moetune.memory.allocator import simulate
from moetune.memory.time.work import Work
from moetune.memory.trace import Trace, trace
from moetune.memory.trace.log import Log
from moetune.memory.trace.tracker import Tracker
from moetune.models.catalog.gpus import find_gpu
from tests.memory.models import toy_run, write_toy

CARD = find_gpu("h100")
LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}}
EXPERTS: dict[str, Any] = {"experts": {"layers": "all", "ids": [1, 2]}, "router": "all"}
MIXED: dict[str, Any] = {**EXPERTS, "lora": {**LORA["lora"], "ids": [3, 4, 5]}}
ON_HOST = {"model": {"experts_on": "host"}, "train": {"accumulate": 3, "layer_by_layer": True}}
KEEPS_ROWS = {"train": {"keep_rows": 1, "accumulate": 2}}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "routers": ("mixtral", {"router": "all"}, {}),
    "lora": ("mixtral", LORA, {"train": {"accumulate": 2}}),
    "lora, biases": ("gpt_oss", LORA, ON_HOST),
    "experts": ("deepseek_v3", EXPERTS, {"train": {"accumulate": 2}}),
    "lomo": ("qwen3_moe", EXPERTS, {"optimizer": {"name": "lomo"}}),
    "rows kept of some": ("mixtral", LORA, KEEPS_ROWS),
    "offloaded": ("olmoe", MIXED, {"optimizer": {"name": "adamw", "offload": True}, "train": {"accumulate": 2}}),
    "ep": ("mixtral", LORA, {"parallel": {"fsdp": 2, "ep": 2}, "hardware": {"count": 2}}),
}
ON_A_PUSH = ("lora, biases", "experts", "ep")


def work_of(log: Log) -> dict[Any, Work]:
    """Work by part of a step, micro-step and layer."""
    found: dict[Any, Work] = {}
    for one in log.done:
        key = one.part, one.step, one.micro_step, None if one.block is None else log.blocks[one.block].layer
        found[key] = found[key] + one.work if key in found else one.work
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("memory", ["one", pytest.param("three", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "case", [name if name in ON_A_PUSH else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_the_log_is_that_of_all_groups(case: str, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, adapt, sections = CASES[case]
    model = write_toy(tmp_path, model_type, experts=8, num_hidden_layers=2)
    monkeypatch.setattr("moetune.experts.bank.most_together", lambda *_: 1 if memory == "one" else 3)
    is_written, written = Tracker.is_written, Counter[bool]()

    def counted(tracker: Tracker, *group: Any) -> bool:
        found = is_written(tracker, *group)
        written[found] += 1
        return found

    def traced(*, simulated: bool = True) -> Trace:
        return trace(toy_run(model, model_type, adapt, **sections), gpu=CARD, simulated=simulated)

    monkeypatch.setattr(Tracker, "is_written", counted)
    short, condensed = traced(), traced(simulated=False)
    monkeypatch.setattr(Tracker, "is_written", lambda *_: False)
    whole = traced()
    one, other = short.log, whole.log
    assert one.entries == other.entries
    assert one.blocks == other.blocks
    assert (one.cuts, one.marks, one.sent) == (other.cuts, other.marks, other.sent)
    assert work_of(one) == work_of(other)
    assert written[True] > 0
    assert len(condensed.log.entries) < len(one.entries)
    for name in ("host_peak", "rounded_peak", "collectives", "work"):
        assert getattr(condensed, name) == getattr(whole, name), name
    for view in (Trace.parts, Trace.terms, Trace.phases, Trace.by_layer, Trace.moment):
        assert view(condensed) == view(whole)


@pytest.mark.full
@pytest.mark.parametrize("into", ["nvfp4", "fp8", "int4"])
def test_rounding_of_experts_that_is_run_twice(into: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All experts' matrices are rounded alike, so two of them tell what all take and compute."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    model = write_toy(tmp_path, "mixtral", experts=6, **sizes)
    monkeypatch.setattr("moetune.experts.bank.most_together", lambda *_: 6)
    train = {"merge_into": into, "accumulate": 2}
    config = toy_run(model, "mixtral", LORA, train=train, model={"base": "bf16"})
    twice = trace(config, gpu=CARD)
    monkeypatch.setattr(Tracker, "_each", lambda tracker, count, tensor: range(count))
    each = trace(config, gpu=CARD)
    assert len(twice.log.entries) < 0.7 * len(each.log.entries)
    assert twice.parts() == each.parts()
    assert twice.host_peak == each.host_peak
    assert twice.work.keys() == each.work.keys()
    for part, work in each.work.items():
        assert vars(twice.work[part]) == pytest.approx(vars(work), rel=1e-12), part
    assert simulate(twice.allocations(), expandable=True) == simulate(each.allocations(), expandable=True)
