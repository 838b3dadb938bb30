"""Terms that sum to the peak, and one verdict."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetune.config.schema import RunConfig
from moetune.memory.about import trains
from moetune.memory.assumed_routing import BALANCED, PUBLISHED, UNKNOWN, AssumedRouting, parse_routing
from moetune.memory.predict import predict_memory
from moetune.memory.report import GpuMemory, LoadPeaks, MemoryReport, Parts, RankMemory
from moetune.memory.trace import Trace, trace
from moetune.memory.unknowns import Unknown, of_context
from moetune.models.catalog.gpus import find_gpu, gpu_names
from moetune.planning.predict import predict
from moetune.run.resolve import ResolvedRun, resolve
from tests.memory.models import toy_run, write_toy

LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}}


@pytest.mark.full
@pytest.mark.parametrize("parallel", [{}, {"fsdp": 2, "ep": 2}])
def test_terms_of_a_rank_sum_to_its_peak(parallel: dict[str, int], tmp_path: Path) -> None:
    sections = {"parallel": parallel, "hardware": {"count": parallel.get("fsdp", 1)}}
    config = toy_run(write_toy(tmp_path, "mixtral"), "mixtral", LORA, **sections)
    report = predict(config, gpu="44GiB")
    for rank in report.ranks:
        assert sum(term.bytes for term in rank.terms) == rank.peak_allocated
        for name, size in rank.parts.items():
            assert sum(term.bytes for term in rank.terms if term.part == name) == size


UNKNOWNS = (Unknown("routing", 0, 2**30, "load"), Unknown("context", 2**20, 0, "drivers"))


def report_of(allocated: int, usable: int) -> MemoryReport:
    rank = RankMemory(0, Parts(frozen_weights=allocated), 1_000, allocated + 500)
    return MemoryReport("m", GpuMemory("g", usable), (rank,), (), LoadPeaks(0, 10))


GIB = 2**30


@pytest.mark.parametrize(
    ("off", "verdict"), [("low", "tight"), ("below", "no"), ("high", "yes"), ("almost", "tight"), ("twice", "yes")]
)
def test_verdict(off: str, verdict: str) -> None:
    """`yes` where the high end fits, `no` where the low end does not."""
    span = replace(report_of(100 * GIB, 1), unknowns=UNKNOWNS).span
    assert span.low < span.expected < span.high
    sizes = {"low": span.low, "below": span.low - 1, "high": span.high, "almost": span.high - 1, "twice": 2 * span.high}
    report = replace(report_of(100 * GIB, sizes[off]), unknowns=UNKNOWNS)
    assert report.verdict == verdict
    assert report.fits is (verdict != "no")
    found = report.to_json()
    assert found["verdict"] == verdict
    assert found["required_range"] == {"low": span.low, "expected": report.required, "high": span.high}
    assert sum(one["above"] for one in found["unknowns"]) == span.high - span.expected
    for described in (found, report.figures()):
        assert described["required_bytes"] == report.required
        assert described["required_range"] == found["required_range"]
    assert (report.least_headroom >= 0) is (verdict == "yes")


@pytest.mark.full
def test_the_routing_widens_the_range_by_what_it_may_take(tmp_path: Path) -> None:
    """Up to published scores where nothing is known; from balanced to the ends of their intervals for scores."""
    model = write_toy(tmp_path, "mixtral", hidden_size=256, intermediate_size=2048, num_hidden_layers=2)
    config = toy_run(model, "mixtral", LORA, train={"micro_batch": 8, "sequence_length": 512, "expert_memory": 0})

    def found(routing: AssumedRouting) -> MemoryReport:
        return predict(config, gpu="44GiB", routing=routing)

    even, unknown = found(BALANCED), found(UNKNOWN)
    assert [one.cause for one in even.unknowns] == ["context"]
    routing = unknown.unknowns[0]
    assert (routing.cause, routing.below) == ("routing", 0)
    assert routing.above == found(PUBLISHED).required - even.required > 0
    assert unknown.required == even.required
    assert unknown.span.high > even.span.high

    layers = {str(layer.index): layer.shape.num_experts for layer in resolve(config, "cuda").structure.moe_layers}
    load = {layer: [1.0, *[2.0] * (count - 2), 9.0] for layer, count in layers.items()}
    (tmp_path / "load.json").write_text(json.dumps({"expert_load": load}))
    recorded = found(parse_routing(str(tmp_path / "load.json")))
    assert recorded.required > even.required
    assert recorded.unknowns[0].below == recorded.required - even.required
    assert recorded.unknowns[0].above == 0


@pytest.mark.parametrize("size", ["24GiB", "44GiB", "80GiB", *gpu_names()])
def test_at_balanced_data_the_range_is_at_most_four_percent_wide(size: str) -> None:
    """Of a run that just fits: context, allocator and the error of the prediction."""
    card = find_gpu(size)
    report = report_of(card.memory.value * 97 // 100 - card.context.value, card.memory.value)
    span = replace(report, unknowns=(of_context(card),)).span
    assert span.low <= span.expected - (card.context.value - card.context_range[0])
    assert span.high - span.low <= 0.04 * span.expected


def toy(model: Path, **sections: Any) -> RunConfig:
    return toy_run(model, "mixtral", {"lora": {"rank": 4, "alpha": 8, "targets": ["experts"]}}, **sections)


@pytest.mark.full
def test_paged_states_are_outside_of_the_allocator(tmp_path: Path) -> None:
    """Large ones: managed memory, which torch's counters do not see."""
    model = write_toy(tmp_path, "mixtral", hidden_size=512, vocab_size=512, num_hidden_layers=2)
    adapt = {"also": ["lm_head.weight", "model.norm.weight"]}
    runs = [toy_run(model, "mixtral", adapt, optimizer={"name": name}) for name in ("adamw8bit", "paged_adamw8bit")]
    plain, paged = (predict(run, gpu="l40s").fullest for run in runs)
    moved = 2 * 512 * 512  # the head's two states; the norm's are small
    assert plain.parts.optimizer_states - paged.parts.optimizer_states == moved
    assert paged.outside_allocator - plain.outside_allocator == moved
    assert paged.host_bytes - plain.host_bytes == moved
    offloaded = toy_run(model, "mixtral", adapt, optimizer={"name": "paged_adamw8bit", "offload": True})
    assert predict(offloaded, gpu="l40s").fullest.outside_allocator == plain.outside_allocator


@pytest.mark.full
def test_plain_segments_reserve_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = toy(write_toy(tmp_path, "mixtral"), train={"micro_batch": 3, "sequence_length": 2048})
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    growing, plain = predict(run).fullest, predict(run, allocator="default").fullest
    assert plain.peak_allocated > growing.peak_allocated  # what is too little to be cut off counts as allocated
    assert plain.peak_reserved != growing.peak_reserved
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert predict(run).fullest == plain


@pytest.mark.full
def test_a_full_card_gives_back_what_is_unused(tmp_path: Path) -> None:
    """On a card that has a little less than would be reserved, less is, and all tensors have their place."""
    run = toy(write_toy(tmp_path, "mixtral"), train={"micro_batch": 3, "sequence_length": 2048})
    free = predict(run, gpu="l40s").fullest
    assert free.peak_reserved - free.peak_allocated > 4 << 20
    size = free.peak_reserved + free.outside_allocator - (1 << 20)
    full = predict(run, gpu=f"{size}B").fullest
    assert full.peak_allocated <= full.peak_reserved <= size - full.outside_allocator


def test_bfloat16_on_a_card_without_it_is_said(tmp_path: Path) -> None:
    model = write_toy(tmp_path, "mixtral")
    for dtype, card, is_said in (("bf16", "t4", True), ("fp16", "t4", False), ("bf16", "l40s", False)):
        notes = predict(toy_run(model, "mixtral", LORA, model={"dtype": dtype}), gpu=card).notes
        assert any("no fast bfloat16" in note for note in notes) is is_said


def test_a_run_is_traced_once_for_each_routing(tmp_path: Path) -> None:
    traced: list[str] = []

    def counted(run: ResolvedRun, routing: AssumedRouting, **options: Any) -> Trace:
        traced.append(routing.name)
        return trace(run, routing, **options)

    report = predict_memory(resolve(toy(write_toy(tmp_path, "mixtral")), "cuda"), tracing=counted)
    assert traced == [BALANCED.name, PUBLISHED.name]
    assert report.unknowns[0].cause == "routing"


def test_no_verdict_depends_on_the_allocator(tmp_path: Path) -> None:
    run = resolve(toy(write_toy(tmp_path, "mixtral")), "cuda")
    whole, quick = (predict_memory(run, gpu="l40s", simulated=simulated) for simulated in (True, False))
    assert (quick.span, quick.verdict, quick.fullest.parts) == (whole.span, whole.verdict, whole.fullest.parts)
    assert quick.time == whole.time is not None
    assert "not simulated" in quick.assumptions[-1]


def test_experts_are_named_where_all_layers_have_the_same(tmp_path: Path) -> None:
    model = write_toy(tmp_path, "mixtral", num_hidden_layers=2)
    for ids, said in (([0, 1], "4 experts: 0-1 of layers 0-1"), ({0: [0], 1: [3]}, "2 experts: chosen by layer")):
        run = resolve(toy_run(model, "mixtral", {"experts": {"ids": ids}}), "cuda")
        assert next(trains(run)).startswith(said)
