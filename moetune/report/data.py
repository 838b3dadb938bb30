"""What a run's data become, for people: on a terminal and as one HTML file, of what `moetune data` has as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from moetune.errors import counted
from moetune.files import write_output
from moetune.report.page import render

_BAR = 40


def print_data(name: str, found: dict[str, Any], console: Console) -> None:
    """Prints the first records, then lengths and counts. Tokens that carry loss are green, every other token is
    underlined; without colours, what carries loss stands between « and »."""
    for number, record in enumerate(found["first"], 1):
        console.rule(f"record {number}", align="left", style="dim")
        text = Text()
        before = False
        for index, (token, trains) in enumerate(record):
            if trains != before and console.color_system is None:
                text.append("«" if trains else "»")
            text.append(token, f"{'bold green' if trains else 'dim'}{' underline' if index % 2 else ''}")
            before = trains
        if before and console.color_system is None:
            text.append("»")
        console.print(text, highlight=False)
    console.rule("tokens a document", align="left", style="dim")
    bins, tallest = _bins(found)
    for low, high, count in bins:
        console.print(f"{f'{low:,} – {high:,}':>17} {count:>9,} {'█' * -(-_BAR * count // tallest)}", highlight=False)
    console.rule(name, align="left", style="dim")
    for line in lines(found):
        console.print(line, highlight=False, soft_wrap=True)


def write_data_page(name: str, found: dict[str, Any], path: Path) -> None:
    """Writes the page, whole or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    bins, tallest = _bins(found)
    page = render(
        "data.html.j2", name=name, lines=[*lines(found)], first=found["first"], histogram=bins, tallest=tallest
    )
    write_output(path, page.encode())


def lines(found: dict[str, Any]) -> Iterator[str]:
    """What there is, in words."""
    train, held_out = found["train"], found["eval"]
    yield (
        f"{counted(train['records'], 'record')} in {counted(train['sequences'], 'sequence')} of up to "
        f"{found['sequence_length']:,} tokens: {counted(found['steps_an_epoch'], 'step')} an epoch, "
        f"{counted(found['sequences_a_step'], 'sequence')} a step"
    )
    padding = f", and {train['padding']:,} of padding" if train["padding"] else ""
    share = train["loss_tokens"] / train["tokens"]
    yield f"{train['tokens']:,} tokens, {train['loss_tokens']:,} of them ({share:.0%}) with loss{padding}"
    sizes = train["lengths"]
    yield (
        f"a document has {sizes['shortest']:,} to {sizes['longest']:,} tokens, the median {sizes['median']:,.0f}; "
        f"{train['dropped']:,} were dropped and {train['cut']:,} cut (data.too_long)"
        + (f", {train['unended']:,} of them before the first answer ends" if train["unended"] else "")
    )
    yield from found["notes"]
    if held_out is not None:
        yield f"held out: {counted(held_out['records'], 'record')}, {held_out['loss_tokens']:,} tokens with loss"


def _bins(found: dict[str, Any]) -> tuple[list[tuple[int, int, int]], int]:
    bins = found["train"]["lengths"]["histogram"]
    return bins, max(count for _, _, count in bins)
