"""What the terminal says: the verdict in each case, sums that balance, and nothing cut off at 80 columns."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from moetune.memory.report import LoadPeaks, MemoryReport, Moment, Parts
from moetune.report.terminal import alike, balance, print_report, verdict, when
from moetune.report.units import gib, percent
from tests.report.sample import GIB, L40S, MIB, PEAK, formula_only, many_ranks, rank, sample, tight, too_big

REPORTS = [sample, tight, too_big, many_ranks, formula_only]


def printed(report: MemoryReport, width: int = 80, *, verbose: bool = True) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_report(report, console, verbose=verbose)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1.00 KiB"),
        (512, "512 B"),
        (1024, "1.00 KiB"),
        (33_554_432, "32.00 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (25_000_000_000, "23.28 GiB"),
        (-(3 * 2**30), "-3.00 GiB"),
        (5000 * 2**30, "5,000.00 GiB"),
    ],
)
def test_bytes_in_words(count: int, text: str) -> None:
    assert gib(count) == text


def test_a_share_of_nothing_is_not_a_number() -> None:
    assert (percent(1, 4), percent(0, 0)) == ("25.0 %", "")


def test_the_verdict_of_a_card_with_room() -> None:
    assert verdict(sample()) == "fits: yes, 11.34 GiB headroom on L40S (44.99 GiB usable)"


def test_the_verdict_of_a_card_too_small() -> None:
    assert verdict(too_big()) == "does NOT fit: 9.65 GiB too much for RTX 4090 (24.00 GiB usable)"


def test_the_verdict_of_a_card_with_little_room() -> None:
    """It fits, and what is left and what may be needed beside it are both said."""
    report = tight()
    assert report.fits is True
    assert verdict(report) == "tight: 360.44 MiB left on L40S (34.00 GiB usable), may be 328.67 MiB short"


def test_the_verdict_without_a_card() -> None:
    assert verdict(sample(gpu=None)) == "needs 33.65 GiB; no GPU named to compare with"


@pytest.mark.parametrize("make", REPORTS)
def test_the_verdict_comes_first_and_last(make: Callable[..., MemoryReport]) -> None:
    for verbose in (True, False):
        assert printed(make(), verbose=verbose).startswith(verdict(make()))
        assert printed(make(), verbose=verbose, width=200).rstrip().endswith(verdict(make()))


@pytest.mark.parametrize("make", [sample, tight, too_big, formula_only])
def test_it_is_one_screen_and_says_what_was_predicted(make: Callable[..., MemoryReport]) -> None:
    about = (("run file", "runs/mine.yaml"), ("trains", "LoRA rank 16 on attention, experts"))
    text = printed(make(about=about), verbose=False)
    assert len(text.splitlines()) <= 45
    assert all(said in text for _, said in about)
    assert "--verbose" in text


def test_host_memory_is_named_where_there_is_any() -> None:
    assert "host memory" not in printed(sample())
    with_host = replace(sample().fullest, host_bytes=65 * GIB)
    assert "Beside that 65.00 GiB of tensors are in pinned host memory." in printed(sample(ranks=(with_host,)))


def test_parts_and_their_sum_are_printed() -> None:
    text = printed(sample())
    for name, count in PEAK.items():
        assert any(name.replace("_", " ") in line and gib(count) in line for line in text.splitlines()), name
    assert next(line for line in text.splitlines() if "allocated at the peak" in line).count("33.02 GiB") == 1
    assert gib(PEAK.total) == "33.02 GiB"


def test_the_balance_adds_up() -> None:
    allocated, cached, reserved, outside, process = (count for _, count in balance(rank()))
    assert (allocated + cached, reserved + outside) == (reserved, process)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("make", REPORTS)
def test_nothing_is_cut_off(make: Callable[..., MemoryReport], width: int) -> None:
    report = make()
    text = printed(report, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    counts = [*report.fullest.parts, *(count for _, count in balance(report.fullest)), report.load.host]
    counts += [term.bytes for term in report.terms] + [item.bytes for item in report.collectives]
    counts += [rank.peak_process for rank in report.ranks]
    counts += [item.bytes for item in report.moment.largest] if report.moment else []
    assert [gib(count) for count in counts if gib(count) not in text] == []


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
    assert "The process needs 60.62 GiB while the weights load." in printed(report)


def test_changes_in_their_order_as_they_are_typed() -> None:
    text = printed(too_big(), 120)
    lines = [line.strip() for line in text.splitlines() if "--set" in line]
    assert lines == [
        "- --set optimizer.name=adamw8bit",
        "- --set 'adapt.experts={layers: 0-2, ids: [0, 1]}' --set optimizer.name=lomo",
    ]
    assert "saves 12.00 GiB: the process then needs 22.82 GiB; optimizer states of one byte" in text


def test_no_change_is_advised_where_it_fits() -> None:
    assert "--set" not in printed(too_big(gpu=L40S))


def test_equal_ranks_are_one_row() -> None:
    fuller = rank(4, Parts(gradients=MIB))
    ranks = [rank(0), rank(1), rank(2), fuller, rank(3), rank(5)]
    assert [numbers for numbers, _ in alike(ranks)] == ["0-3,5", "4"]


def test_ranks_and_collectives_only_where_there_are_several() -> None:
    assert "8 ranks" in printed(many_ranks())
    assert "all-gather" in printed(many_ranks())
    assert "Rank 0, the fullest of 8, needs" in printed(many_ranks())
    assert "ranks" not in printed(sample())
    assert "communication" not in printed(sample())


def test_a_formula_has_no_moment() -> None:
    text = printed(formula_only())
    assert "largest allocations" not in text
    assert "closed form" in text
