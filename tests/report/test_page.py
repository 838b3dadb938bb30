"""The page is whole, well-formed and alone, and shows names as text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from moetune.errors import UserError
from moetune.memory.report import GpuMemory, MemoryReport
from moetune.report.page import render_page, write_page
from moetune.report.terminal import balance, effect, flags, verdict
from moetune.report.units import gib
from tests.report.sample import PEAK, formula_only, many_ranks, sample, tight, too_big
from tests.report.test_terminal import printed

REPORTS = [sample, tight, too_big, many_ranks, formula_only]
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that every element is closed in order; collects text, attributes and ids."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


@pytest.mark.parametrize("make", REPORTS)
def test_the_page_is_well_formed_and_says_the_verdict(make: Callable[..., MemoryReport]) -> None:
    page = Page(render_page(make()))
    assert verdict(make()) in page.text
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("make", REPORTS)
def test_the_page_loads_nothing(make: Callable[..., MemoryReport]) -> None:
    html = render_page(make())
    loads = {"src", "href", "xlink:href", "action", "data", "poster", "srcset"}
    assert [value for name, value in Page(html).attributes if name in loads and not (value or "").startswith("#")] == []
    assert set(re.findall(r"https?://[^\"'\s<]*", html)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert re.findall(r"url\((?!#)|@import", html) == []


@pytest.mark.parametrize("make", REPORTS)
def test_numbers_of_every_section(make: Callable[..., MemoryReport]) -> None:
    report = make()
    text = Page(render_page(report)).text
    counts = [*report.fullest.parts, *(count for _, count in balance(report.fullest)), report.load.host]
    counts += [term.bytes for term in report.terms] + [item.bytes for item in report.collectives]
    counts += [rank.peak_process for rank in report.ranks]
    assert [gib(count) for count in counts if gib(count) not in text] == []
    assert all(line in text for line in (*report.assumptions, *report.notes))
    assert all(term.formula in text and f"docs/{term.page}" in text for term in report.terms)


@pytest.mark.parametrize("make", [sample, formula_only])
def test_a_name_is_never_code(make: Callable[..., MemoryReport]) -> None:
    name = "</title></script><script>alert(1)</script>"
    hostile = make(model=name, gpu=GpuMemory(name, 2**35), notes=(name,), assumptions=(name,))
    page = Page(render_page(hostile))
    assert page.tags.count("script") == Page(render_page(make())).tags.count("script")
    assert page.text.count(name) >= 6  # title, heading, verdict, chart, note, assumption


def test_changes_are_those_of_the_terminal_and_of_json() -> None:
    """As they are typed, in the same order, with the same figures."""
    report = too_big()
    page, terminal = (" ".join(text.split()) for text in (Page(render_page(report)).text, printed(report, 200)))
    assert "--set 'adapt.experts={layers: 0-2, ids: [0, 1]}' --set optimizer.name=lomo" in page
    for text in (page, terminal):
        places = [text.index(said) for one in report.changes for said in (flags(one), effect(one))]
        assert places == sorted(places)
    assert [one["peak_process"] for one in report.to_json()["changes"]] == [24_500_000_000, 23_500_000_000]


def test_the_pointer_finds_every_part_of_the_peak() -> None:
    match = re.search(r"const samples = (.*);\n", render_page(sample()))
    assert match is not None
    samples = json.loads(match[1])
    assert [samples[0]["at"], samples[-1]["at"]] == [0, 1]
    peak = next(one for one in samples if one["title"] == f"backward: {gib(PEAK.total)}")
    assert [text for _, text in peak["lines"]] == [
        f"{name.replace('_', ' ')} {gib(count)}" for name, count in PEAK.items() if count
    ]


def test_without_a_timeline_there_is_no_script() -> None:
    assert "<script" not in render_page(formula_only())


def test_the_page_replaces_an_older_one_and_leaves_nothing_aside(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_page(formula_only(), path)
    write_page(sample(), path)
    assert path.read_text() == render_page(sample())
    assert list(tmp_path.iterdir()) == [path]


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"report\.html' cannot be written: Not a directory"):
        write_page(formula_only(), tmp_path / "file" / "report.html")
