"""A memory report in words and tables: the verdict in each case, sums that balance, nothing cut off at 80 columns."""

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from moetune.memory.host import HostMemory
from moetune.memory.report import LoadPeaks, MemoryReport, Moment, Parts
from moetune.models.catalog.gpus import Figure
from moetune.report.memory import alike, balance, memory_view, verdict, when
from moetune.report.terminal import show
from moetune.report.units import gib, percent
from tests.report.sample import GIB, L40S, MIB, many_ranks, rank, sample, tight, too_big, without_timeline

REPORTS = [sample, tight, too_big, many_ranks, without_timeline]


def printed(report: MemoryReport, width: int = 80, *, verbose: bool = True) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(memory_view(report), console, verbose=verbose)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def counts(report: MemoryReport) -> list[int]:
    """The bytes that a view has to hold."""
    return [
        *report.fullest.parts,
        *(count for _, count in balance(report.fullest)),
        report.load.host,
        *(term.bytes for term in report.terms),
        *(item.bytes for item in report.collectives),
        *(rank.peak_process for rank in report.ranks),
        *(item.bytes for item in (report.moment.largest if report.moment else ())),
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1023, "1.00 KiB"), (512, "512 B"), (1024, "1.00 KiB"), (33_554_432, "32.00 MiB"),
        (2**30 - 1, "1.00 GiB"), (25_000_000_000, "23.28 GiB"), (-(3 * 2**30), "-3.00 GiB"),
        (5000 * 2**30, "5,000.00 GiB"),
    ],
)  # fmt: skip
def test_bytes_in_words(count: int, text: str) -> None:
    assert gib(count) == text


def test_a_share_of_nothing_is_not_a_number() -> None:
    assert (percent(1, 4), percent(0, 0)) == ("25.0 %", "")


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (sample(), "fits: yes, 10.67 to 11.51 GiB left on L40S (44.99 GiB usable)"),
        (too_big(), "does NOT fit: 9.65 GiB too much for RTX 4090 (24.00 GiB usable)"),
        (tight(), "tight: 532.72 MiB left to 328.67 MiB too much on L40S (34.00 GiB usable)"),
        (sample(gpu=None), "needs 33.65 GiB; no GPU named to compare with"),
    ],
    ids=["room", "too small", "little room", "no card"],
)
def test_the_verdict(report: MemoryReport, said: str) -> None:
    assert verdict(report) == said


@pytest.mark.parametrize("make", REPORTS)
def test_the_verdict_comes_first_and_last(make: Callable[..., MemoryReport]) -> None:
    about = (("run file", "runs/mine.yaml"), ("trains", "LoRA rank 16 on attention, experts"))
    for verbose in (True, False):
        text = printed(make(about=about), verbose=verbose, width=200)
        assert text.startswith(verdict(make()))
        assert text.rstrip().endswith(verdict(make()))
        assert all(said in text for _, said in about)
    assert "--verbose" in printed(make(), verbose=False)


def test_host_memory_is_named_where_there_is_any() -> None:
    assert "host memory" not in printed(sample())
    host = HostMemory(process=GIB, driver=GIB, tensors=66 * GIB, pinned=65 * GIB, processes=2)
    said = printed(sample(host=host), width=200)
    assert "The host needs 134.00 to 136.00 GiB of RAM, 130.00 GiB of it pinned." in said


@pytest.mark.parametrize(
    ("room", "verdict_", "said"),
    [
        (2, "no", "does NOT fit: 1.00 GiB too much for the host (2.00 GiB, there)"),
        (4, "tight", "tight: 1.00 GiB left to 1.00 GiB too much on the host (4.00 GiB, there)"),
        (5, "yes", "fits: yes, 10.67 to 11.51 GiB left on L40S (44.99 GiB usable)"),
    ],
)
def test_the_host_is_part_of_the_verdict(room: int, verdict_: str, said: str) -> None:
    host = HostMemory(process=GIB, driver=2 * GIB, tensors=2 * GIB, room=Figure(room * GIB, "there"))
    report = sample(host=host)
    assert (report.verdict, report.fits) == (verdict_, verdict_ != "no")
    assert (report.card_verdict, report.host_verdict) == ("yes", verdict_)
    assert verdict(report) == said
    assert report.to_json()["required_range"] == sample().to_json()["required_range"]  # those of the card
    alone = replace(report, gpu=None)
    assert alone.verdict == verdict_
    assert "the host" in verdict(alone)
    assert replace(too_big(), host=host).verdict == "no"


def test_the_balance_adds_up() -> None:
    allocated, cached, reserved, outside, process = (count for _, count in balance(rank()))
    assert (allocated + cached, reserved + outside) == (reserved, process)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("make", REPORTS)
def test_nothing_is_cut_off(make: Callable[..., MemoryReport], width: int) -> None:
    text = printed(make(), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert [gib(count) for count in counts(make()) if gib(count) not in text] == []


def test_brackets_are_text_and_not_markup() -> None:
    assert "[E, h, i per layer]" in " ".join(printed(sample(), 120).split())
    assert "[red]model" in printed(sample(model="[red]model"))


def test_the_moment_of_the_peak_is_said() -> None:
    text = " ".join(printed(sample()).split())
    assert "step 1, micro-step 7 (from 0), in the backward pass of model.layers.31.mlp" in text
    assert when(Moment(0, 0, "optimizer", "", ())) == "step 0, micro-step 0 (from 0), in the optimizer's step"


def test_a_peak_while_loading_is_said_and_decides() -> None:
    report = sample(load=LoadPeaks(host=GIB, gpu=60 * GIB))
    assert report.fits is False
    assert "The process needs 60.32 to 61.84 GiB, 60.62 GiB expected, while the weights load." in " ".join(
        printed(report).split()
    )


def test_changes_in_their_order_as_they_are_typed_and_only_where_it_does_not_fit() -> None:
    text = printed(too_big(), 120)
    assert [line.strip() for line in text.splitlines() if "--set" in line] == [
        "- --set optimizer.name=adamw8bit",
        "- --set 'adapt.experts={layers: 0-2, ids: [0, 1]}' --set optimizer.name=lomo",
    ]
    assert "saves 12.00 GiB: the process then needs 22.82 GiB; optimizer states of one byte" in text
    assert "--set" not in printed(too_big(gpu=L40S))


def test_equal_ranks_are_one_row() -> None:
    fuller = rank(4, Parts(gradients=MIB))
    ranks = [rank(0), rank(1), rank(2), fuller, rank(3), rank(5)]
    assert [numbers for numbers, _ in alike(ranks)] == ["0-3,5", "4"]


def test_sections_only_where_there_is_something_to_say() -> None:
    several, one, without = printed(many_ranks()), printed(sample()), printed(without_timeline())
    for said in ("8 ranks", "all-gather", "Rank 0, the fullest of 8, needs", "communication"):
        assert said in several
        assert said not in one
    assert "largest allocations" in one
    assert "largest allocations" not in without
