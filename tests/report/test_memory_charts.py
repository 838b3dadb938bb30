"""Files that are what their suffix says, drawn from any report; the chart was looked at by eye."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from moetune.memory.report import LoadPeaks, MemoryReport, Parts, RankMemory, Sample
from moetune.report.memory_charts import memory_chart, thinned
from tests.report.sample import GIB, MIB, PEAK, many_ranks, rank, sample, timeline, too_big, without_timeline

MAGIC = {".png": b"\x89PNG\r\n\x1a\n", ".PNG": b"\x89PNG\r\n\x1a\n", ".svg": b"<?xml"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("make", "suffix"), [(sample, ".png"), (too_big, ".PNG"), (many_ranks, ".svg"), (without_timeline, ".svg")]
)
def test_a_file_is_what_its_suffix_says(tmp_path: Path, make: Callable[..., MemoryReport], suffix: str) -> None:
    path = tmp_path / f"figure{suffix}"
    memory_chart(make()).save(path)
    assert path.read_bytes().startswith(MAGIC[suffix])
    assert list(path.parent.iterdir()) == [path]


def test_the_same_report_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        memory_chart(sample()).save(tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_labels_are_text_and_follow_the_theme() -> None:
    svg = memory_chart(too_big()).svg()
    for label in ("34.05 GiB", "RTX 4090: 24.00 GiB usable", "forward", "backward", "frozen weights"):
        assert f">{label}</text>" in svg
    for said in ("peak 33.02 GiB", "above 30.68 GiB that do not change"):
        assert said in svg
    assert "var(--ink)" in svg
    assert "#1b1f24" not in svg
    assert "backward" not in memory_chart(without_timeline()).svg()


def test_a_card_far_larger_than_the_need_leaves_the_bars_readable() -> None:
    tiny = RankMemory(0, Parts(frozen_weights=4 * MIB), 2 * MIB, 20 * MIB)
    report = sample(ranks=(tiny,), load=LoadPeaks(0, 4 * MIB), timeline=(Sample("forward", tiny.parts),))
    assert "far beyond this chart" in memory_chart(report).svg()


@pytest.mark.full
def test_odd_reports_are_drawn_without_a_warning() -> None:
    nothing = RankMemory(0, Parts(), 0, 0)
    ranks = tuple(rank(n, Parts(frozen_weights=n * GIB)) for n in range(20))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory_chart(sample(ranks=(nothing,), load=LoadPeaks(0, 0), gpu=None, timeline=())).svg()
        memory_chart(sample(ranks=(nothing,), load=LoadPeaks(0, 0), timeline=(Sample("forward", Parts()),))).svg()
        svg = memory_chart(sample(ranks=ranks, model="of $x$ and $y", gpu=None)).svg()
    assert "the 12 fullest of 20 kinds of rank" in svg


def test_thinning_keeps_the_peak_and_the_phases() -> None:
    long = timeline() * 10
    kept = thinned(long)
    assert len(kept) < 500
    assert max(sample.parts.total for _, sample in kept) == PEAK.total
    assert [index for index, sample in kept if sample.label] == [index for index, s in enumerate(long) if s.label]
    assert all(long[index] is sample for index, sample in kept)
    assert thinned(long[:5]) == list(enumerate(long[:5]))
