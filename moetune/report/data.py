"""View of `moetune data`: records with the tokens that carry loss, and statistics."""

from collections.abc import Iterator
from typing import Any

from moetune.errors import counted
from moetune.report.view import Records, Table, View, ViewSection

_BAR = 40  # width of the longest histogram bar, in characters


def data_view(name: str, preview: dict[str, Any]) -> View:
    """Return the view that `moetune data` prints, titled `name`; `preview` is the object that `--json` prints."""
    verdict, *lines = words(preview)
    bins = preview["train"]["lengths"]["histogram"]
    tallest = max(count for *_, count in bins)
    rows = [(f"{low:,} – {high:,}", f"{count:,}", "█" * -(-_BAR * count // tallest)) for low, high, count in bins]
    sections = [
        ViewSection("first records", Records(preview["first"])),
        ViewSection("tokens a document", Table((">tokens", ">documents", ""), rows)),
    ]
    return View(name, verdict, None, lines, sections=sections)


def words(preview: dict[str, Any]) -> Iterator[str]:
    """Yield sentences on data, from the object that `--json` prints, `preview`: sequences and steps per epoch, tokens,
    lengths of documents, notes, and held-out data."""
    train, held_out = preview["train"], preview["eval"]
    yield (
        f"{counted(train['records'], 'record')} in {counted(train['sequences'], 'sequence')} of up to "
        f"{preview['sequence_length']:,} tokens: {counted(preview['steps_an_epoch'], 'step')} an epoch, "
        f"{counted(preview['sequences_a_step'], 'sequence')} a step"
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
    yield from preview["notes"]
    if held_out is not None:
        yield f"held out: {counted(held_out['records'], 'record')}, {held_out['loss_tokens']:,} tokens with loss"
