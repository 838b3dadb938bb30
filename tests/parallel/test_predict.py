"""`predict` of several ranks: each has its own figures, and ranks that are alike share a trace."""

from pathlib import Path
from typing import Any

import pytest

from moetune.memory.assumed_routing import BALANCED, AssumedRouting
from moetune.memory.predict import kinds_of_ranks, predict_memory
from moetune.memory.trace import trace
from moetune.planning.predict import predict
from moetune.run.resolve import ResolvedRun, resolve
from tests import small
from tests.memory.models import toy_run, write_toy


def config_of(model: Path, adapt: str, accumulate: int = 1, more: Any = None, **parallel: Any) -> Any:
    ranks = parallel.get("fsdp", 1) * parallel.get("replicate", 1)
    return small.run_config(
        model, model, model, adapt,
        parallel=parallel, hardware={"count": ranks}, train={"accumulate": accumulate}, adapt=more or {},
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("parallel", [{"fsdp": 2, "ep": 2}, {"fsdp": 2, "zero": 1}])
def test_few_micro_steps_stand_for_all(parallel: dict[str, Any], small_model: Path) -> None:
    """Two of five are run, or three where the last differs; what all five send is counted, and the peak is theirs."""
    config = config_of(small_model, "experts", 5, **parallel)
    few, all_five = trace(config), trace(config, micro_steps=5)
    assert few.parts(few.peak) == all_five.parts(all_five.peak)
    key = lambda one: (one.kind, one.axis, one.what)  # noqa: E731
    assert sorted(few.collectives, key=key) == sorted(all_five.collectives, key=key) != []


@pytest.mark.full
def test_every_rank_is_reported(small_model: Path) -> None:
    traced: list[int] = []

    def counted(config: Any, routing: Any, *, rank: int, gpu: Any) -> Any:
        traced.append(rank)
        return trace(config, routing, rank=rank, gpu=gpu)

    report = predict_memory(resolve(config_of(small_model, "experts", fsdp=4, ep=2), "cuda"), tracing=counted)
    assert [rank.rank for rank in report.ranks] == [0, 1, 2, 3]
    # one trained expert on each rank, and every row divides by four; at uneven routing experts receive unlike rows
    assert traced == [0, 0, 1]
    assert {one.axis for one in report.collectives} == {"fsdp", "efsdp", "ep"}
    assert report.to_json()["collectives"]


@pytest.mark.full
def test_ranks_that_differ_have_figures_of_their_own(small_model: Path) -> None:
    """One expert of one layer trains whole: on one of four ranks."""
    one = {"experts": {"layers": "0", "ids": [0]}}
    report = predict(config_of(small_model, "router", more=one, fsdp=4, ep=4))
    assert len({rank.parts.optimizer_states for rank in report.ranks}) > 1
    assert report.fullest.peak_process == max(rank.peak_process for rank in report.ranks)


@pytest.mark.full
def test_what_makes_ranks_differ(small_model: Path) -> None:
    config = resolve(config_of(small_model, "router", fsdp=4, ep=4), "cuda")
    assert len(set(kinds_of_ranks(config, by_expert=False))) == 1
    assert len(set(kinds_of_ranks(config, by_expert=True))) == 4  # a full expert is on one of them
    assert len(predict(config, routing=AssumedRouting("skew:3", 3.0)).ranks) == 4
    uneven = resolve(config_of(small_model, "router", fsdp=3), "cuda")
    assert len(set(kinds_of_ranks(uneven, by_expert=False))) == 3  # 64 / 3
    fp32 = {"model": {"base": "fp32", "dtype": "fp32"}, "parallel": {"tp": 2, "ep": 2}, "hardware": {"count": 2}}
    for length, kinds in ((64, 1), (63, 2)):  # one rank dispatches a token more
        odd = {"train": {"micro_batch": 1, "sequence_length": length}}
        run = small.run_config(small_model, small_model, small_model, "router", **fp32, **odd)
        assert len(set(kinds_of_ranks(resolve(run, "cuda"), by_expert=False))) == kinds


@pytest.mark.full
@pytest.mark.parametrize("adapt", ["router", "lora"])
def test_frozen_tensors_that_divide_unevenly_take_equal_memory(adapt: str, tmp_path: Path) -> None:
    """The gate of Qwen3-Next's shared expert has one row: a second rank stores a shard of padding."""
    toy = write_toy(tmp_path, "qwen3_next", experts=4, num_hidden_layers=2)
    lora = {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}
    adapts: dict[str, dict[str, Any]] = {"router": {"router": "all"}, "lora": {"lora": lora}}
    layout = {"parallel": {"fsdp": 2, "ep": 2}, "hardware": {"count": 2}}
    run = resolve(toy_run(toy, "qwen3_next", adapts[adapt], **layout), "cuda")
    gates = [one for one in run.structure.parameters if one.name.endswith("shared_expert_gate.weight")]
    assert {one.shape[0] for one in gates} == {1}
    assert len(set(kinds_of_ranks(run, by_expert=False))) == 1
    one, other = (trace(run, BALANCED, rank=rank) for rank in range(2))
    # on fake tensors, FSDP2 pads the second rank's shards once more, which a trace counts as saved activations
    for found in one, other:
        assert found.parts().total == one.parts().total
        assert (found.rounded_peak, found.host_peak, found.load) == (one.rounded_peak, one.host_peak, one.load)


@pytest.mark.full
def test_ranks_differ_by_which_experts_are_computed_together(tmp_path: Path) -> None:
    """Four of eight have LoRA, two on each rank: on the first they alternate with the others, on the second they do
    not, so that groups are larger."""
    toy = write_toy(tmp_path, "mixtral", experts=8, intermediate_size=512, num_hidden_layers=2)
    layout = {"parallel": {"fsdp": 2, "ep": 2}, "hardware": {"count": 2}, "train": {"sequence_length": 256}}

    def run(**some: Any) -> ResolvedRun:
        lora = {"rank": 4, "alpha": 8, "targets": ["experts"], **some}
        return resolve(toy_run(toy, "mixtral", {"lora": lora}, **layout), "cuda")

    mixed = run(ids=[0, 1, 3, 4])
    assert set(mixed.placement.values()) == {((0, 2, 3, 6), (1, 4, 5, 7))}
    assert len(set(kinds_of_ranks(mixed, by_expert=False))) == 2
    assert len(set(kinds_of_ranks(run(), by_expert=False))) == 1
    first, second = (trace(mixed, BALANCED, rank=rank).parts().total for rank in range(2))
    assert second > first


@pytest.mark.full
def test_the_fullest_rank_may_be_any(tmp_path: Path) -> None:
    """A recorded load, under which the first rank receives most."""
    toy = write_toy(tmp_path, "mixtral", intermediate_size=512, num_hidden_layers=2)
    adapt = {"lora": {"rank": 4, "alpha": 8, "targets": ["experts"]}}
    layout = {"parallel": {"fsdp": 2, "ep": 2}, "hardware": {"count": 2}, "train": {"sequence_length": 256}}
    run = resolve(toy_run(toy, "mixtral", adapt, **layout), "cuda")
    load = tuple((layer.index, (8.0, 2.0, 1.0, 1.0)) for layer in run.structure.moe_layers)
    routing = AssumedRouting("recorded", None, load, lowest=BALANCED)
    uneven, even = (predict(run, routing=one) for one in (routing, BALANCED))
    assert uneven.ranks[0].peak_allocated > max(even.ranks[0].peak_allocated, uneven.ranks[1].peak_allocated)
    assert uneven.unknowns[0].cause == "routing"
    assert uneven.unknowns[0].below == pytest.approx(uneven.required - even.required, rel=0.01)
