"""The page is whole, well-formed and alone, and shows names as text."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from moetune.errors import UserError
from moetune.memory.report import GpuMemory, MemoryReport
from moetune.report.memory import memory_view, verdict
from moetune.report.memory_charts import memory_chart
from moetune.report.page import page, write_page
from moetune.report.units import gib
from tests.report.sample import many_ranks, sample, tight, too_big, without_timeline
from tests.report.test_memory import counts

REPORTS = [sample, tight, too_big, many_ranks, without_timeline]
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


def rendered(report: MemoryReport) -> str:
    return page(memory_view(report), [memory_chart(report)])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("make", REPORTS)
def test_the_page_is_well_formed_alone_and_complete(make: Callable[..., MemoryReport]) -> None:
    report = make()
    html = rendered(report)
    parsed = Page(html)
    ids = [value for name, value in parsed.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    loads = {"src", "href", "xlink:href", "action", "data", "poster", "srcset"}
    assert [value for name, value in parsed.attributes if name in loads and not (value or "").startswith("#")] == []
    assert set(re.findall(r"https?://[^\"'\s<]*", html)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert re.findall(r"url\((?!#)|@import|<script", html) == []
    text = parsed.text
    assert verdict(report) in text
    assert [gib(count) for count in counts(report) if gib(count) not in text] == []
    assert all(line in text for line in (*report.assumptions, *report.notes))
    assert all(term.numbers in text and f"docs/{term.page}" in text for term in report.terms)


@pytest.mark.parametrize("make", [sample, without_timeline])
def test_a_name_is_never_code(make: Callable[..., MemoryReport]) -> None:
    name = "</title></script><script>alert(1)</script>"
    parsed = Page(rendered(make(model=name, gpu=GpuMemory(name, 2**35), notes=(name,), assumptions=(name,))))
    assert "script" not in parsed.tags
    assert parsed.text.count(name) >= 6  # title, heading, verdict, chart, note, assumption


def test_the_page_replaces_an_older_one_and_leaves_nothing_aside(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_page(memory_view(without_timeline()), path)
    write_page(memory_view(sample()), path)
    assert path.read_text() == page(memory_view(sample()))
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(UserError, match=r"page\.html' cannot be written: Not a directory"):
        write_page(memory_view(sample()), path / "page.html")
