"""Terms that sum to the peak, and one verdict."""

from pathlib import Path
from typing import Any

import pytest

from moetune.config.schema import RunConfig
from moetune.memory.predict import Method, predict
from moetune.memory.report import GpuMemory, LoadPeaks, MemoryReport, Parts, RankMemory
from tests.memory.models import toy_run, write_toy
from tests.thinned import in_pairs

LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("parallel", "method"), in_pairs([{}, {"fsdp": 2, "ep": 2}], ["trace", "formula"], every=2))
def test_terms_of_a_rank_sum_to_its_peak(parallel: dict[str, int], method: Method, tmp_path: Path) -> None:
    sections = {"parallel": parallel, "hardware": {"count": parallel.get("fsdp", 1)}}
    config = toy_run(write_toy(tmp_path, "mixtral"), "mixtral", LORA, **sections)
    report = predict(config, method=method, gpu="44GiB")
    for rank in report.ranks:
        assert sum(term.bytes for term in rank.terms) == rank.peak_allocated
        for name, size in rank.parts.items():
            assert sum(term.bytes for term in rank.terms if term.part == name) == size


def report_of(allocated: int, usable: int) -> MemoryReport:
    rank = RankMemory(0, Parts(frozen_weights=allocated), 1_000, allocated + 500)
    return MemoryReport("m", "trace", GpuMemory("g", usable), (rank,), (), LoadPeaks(0, 10))


@pytest.mark.parametrize(
    ("usable", "verdict"), [(101_000, "tight"), (100_999, "no"), (103_020, "yes"), (103_019, "tight"), (10**9, "yes")]
)
def test_verdict(usable: int, verdict: str) -> None:
    report = report_of(100_000, usable)
    assert report.verdict == verdict
    assert report.fits is (verdict != "no")
    assert report.to_json()["verdict"] == verdict


def catalog(model: str, adapt: dict[str, Any], rows: int, length: int, **model_keys: Any) -> RunConfig:
    train = {"micro_batch": rows, "sequence_length": length, "accumulate": 1}
    keys = {"path": model, "weights": "random", **model_keys}
    data = {"train": "unread", "packing": "attention" not in model_keys}
    run = {"model": keys, "adapt": adapt, "optimizer": {"name": "adamw8bit"}, "train": train, "data": data}
    return RunConfig.model_validate(run)


ON_ALL: dict[str, Any] = {"lora": {"rank": 16, "alpha": 32, "targets": ["attention", "experts"]}}


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "gpu"),
    [
        (catalog("qwen3-30b-a3b", ON_ALL, 2, 2048), "rtx4090"),
        (catalog("gpt-oss-20b", ON_ALL, 2, 2048), "rtx4090"),
        (catalog("deepseek-v2-lite", ON_ALL, 1, 2048, attention="eager"), "rtx4090"),
    ],
    ids=["qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite eager"],
)
def test_both_methods_say_the_same(config: RunConfig, gpu: str) -> None:
    by_trace, by_formula = (predict(config, method=method, gpu=gpu) for method in ("trace", "formula"))
    assert by_trace.verdict == by_formula.verdict
    assert by_formula.required == pytest.approx(by_trace.required, rel=1e-3)


def toy(model: Path, **sections: Any) -> RunConfig:
    return toy_run(model, "mixtral", {"lora": {"rank": 4, "alpha": 8, "targets": ["experts"]}}, **sections)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("method", ["trace", "formula"])
def test_paged_states_are_outside_of_the_allocator(method: Any, tmp_path: Path) -> None:
    """Large ones: managed memory, which torch's counters do not see."""
    model = write_toy(tmp_path, "mixtral", hidden_size=512, vocab_size=512)
    adapt = {"also": ["lm_head.weight", "model.norm.weight"]}
    runs = [toy_run(model, "mixtral", adapt, optimizer={"name": name}) for name in ("adamw8bit", "paged_adamw8bit")]
    plain, paged = (predict(run, method=method, gpu="l40s").fullest for run in runs)
    moved = 2 * 512 * 512  # the head's two states; the norm's are small
    assert plain.parts.optimizer_states - paged.parts.optimizer_states == moved
    assert paged.outside_allocator - plain.outside_allocator == moved
    assert paged.host_bytes - plain.host_bytes == moved


def test_plain_segments_reserve_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = toy(write_toy(tmp_path, "mixtral"), train={"micro_batch": 3, "sequence_length": 2048})
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    growing, plain = predict(run).fullest, predict(run, allocator="default").fullest
    assert plain.peak_allocated > growing.peak_allocated  # what is too little to be cut off counts as allocated
    assert plain.peak_reserved != growing.peak_reserved
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert predict(run).fullest == plain


def test_a_full_card_gives_back_what_is_unused(tmp_path: Path) -> None:
    """On a card that has a little less than would be reserved, less is, and all tensors have their place."""
    run = toy(write_toy(tmp_path, "mixtral"), train={"micro_batch": 3, "sequence_length": 2048})
    free = predict(run, gpu="l40s").fullest
    assert free.peak_reserved - free.peak_allocated > 4 << 20
    size = free.peak_reserved + free.outside_allocator - (1 << 20)
    full = predict(run, gpu=f"{size}B").fullest
    assert full.peak_allocated <= full.peak_reserved <= size - full.outside_allocator
