"""`show`: prints views, sections and tables on a terminal of 80 columns or more."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.box import HEAVY_HEAD, Box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from moetune.report.view import Records, Table, View, ViewSection

_WIDEST = 1000
STYLES = {"yes": "bold green", "tight": "bold yellow", "no": "bold red", None: "bold"}


def show(what: View | ViewSection | Table | RenderableType, console: Console, *, verbose: bool = False) -> None:
    """Print a view, with its verdict first and last; or a section, table, str (not wrapped) or rich renderable.

    With `verbose`, print everything in a view: its detail sections too.
    """
    for renderable in _whole(what, verbose) if isinstance(what, View) else [_part(what)]:
        console.print(renderable, crop=False, soft_wrap=isinstance(what, str))


def _whole(view: View, verbose: bool) -> Iterator[RenderableType]:
    verdict = Text(view.verdict, STYLES[view.outcome])
    yield verdict
    yield from map(Text, view.lines)
    if view.about:
        grid = RichTable.grid(padding=(0, 1))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in view.about:
            grid.add_row(Text(name), Text(value))
        yield grid
    yield from (_part(section) for section in view.sections if verbose or not section.is_detail)
    if not verbose and any(section.is_detail for section in view.sections):
        yield Text(f"\n{view.more}", "dim")
    yield verdict


def _part(part: ViewSection | Table | RenderableType) -> RenderableType:
    if isinstance(part, Table):
        return _Drawn(part)
    if not isinstance(part, ViewSection):
        return part
    body = part.body
    if isinstance(body, Table):
        drawn: RenderableType = _Drawn(body)
    elif isinstance(body, Records):
        drawn = Group(*_records(body))
    else:
        drawn = Text(body) if isinstance(body, str) else _list(body)
    # rich would wrap a title of the table at the table's width.
    return Group(Text(f"\n{part.title}", "bold"), drawn)


@dataclass(frozen=True)
class _Drawn:
    """A table in a box. Where it needs more columns than there are, it has no box, and lines may be longer than the
    terminal is wide, because a name that is broken in two could not be copied."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for box in (HEAVY_HEAD, None):
            drawn = _table(self.table, box)
            least = Measurement.get(console, options.update(width=_WIDEST), drawn).minimum
            if least <= options.max_width:
                break
        yield from console.render(drawn, options.update(width=max(least, options.max_width)))


def _table(table: Table, box: Box | None) -> RichTable:
    # Cells are Text, because rich would read square brackets in a str (names, formulas) as markup.
    drawn = RichTable(show_lines=any("\n" in cell for row in table.rows for cell in row), box=box, pad_edge=bool(box))
    for heading, *cells in zip(table.headings, *table.rows, *table.totals, strict=True):
        is_number, title = heading.startswith(">"), heading.removeprefix(">")
        words = [cell for cell in cells if len(cell.split()) == 1]
        is_names = len(words) == len(cells) and len(title) <= max(map(len, words), default=0)
        justify = "right" if is_number else "left"
        drawn.add_column(Text(title), justify=justify, no_wrap=is_number or is_names, overflow="fold")  # type: ignore[arg-type]
    for row in table.rows:
        drawn.add_row(*map(_cell, row))
    drawn.add_section()
    for row in table.totals:
        drawn.add_row(*map(Text, row), style="bold")
    return drawn


def _cell(text: str) -> Text:
    first, *details = text.split("\n", 1)
    return Text.assemble(first, *("\n", (details[0], "dim")) if details else ())


def _list(lines: Iterable[str]) -> RenderableType:
    """Return a renderable list of the lines, with a `-` before each and wrapped text indented."""
    grid = RichTable.grid(padding=(0, 1))
    grid.add_column()
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row("-", _cell(line))
    return grid


def _records(records: Records) -> Iterator[RenderableType]:
    """Yield each record as text: tokens with loss in green between `«` and `»`, every second token underlined."""
    for number, record in enumerate(records.records, 1):
        text, before = Text(f"{number}: ", "dim"), False
        for index, (token, trains) in enumerate([*record, ("", False)]):
            if trains != before:
                text.append("«" if trains else "»", "dim")
            text.append(token, f"{'bold green' if trains else 'dim'}{' underline' if index % 2 else ''}")
            before = trains
        yield text
