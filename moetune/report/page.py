"""Views and charts as an HTML page: one file, no scripts, nothing loaded from elsewhere."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from moetune.files import write_output
from moetune.report.charts import COLOURS, Chart
from moetune.report.units import named
from moetune.report.view import Records, Table, View


def write_page(view: View, path: Path, charts: Sequence[Chart] = (), *, refresh: int | None = None) -> None:
    """Write a view and charts as an HTML page. If writing fails, no partial file is left.

    Args:
        refresh: seconds after which a browser reloads the page; None: never.

    Raises:
        UserError: the file cannot be written, or exists and was not written by moetune.
    """
    write_output(path, page(view, charts, refresh))


def page(view: View, charts: Sequence[Chart] = (), refresh: int | None = None) -> str:
    """Return a view and charts as an HTML page, which a browser reloads after `refresh` seconds (None: never)."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests |= {
        "table": lambda body: isinstance(body, Table),
        "records": lambda body: isinstance(body, Records),
    }
    return environment.get_template("page.html.j2").render(
        view=view,
        figures=[(chart.title, chart.svg()) for chart in charts],
        colours={named(part): colour for part, colour in COLOURS.items()},
        refresh=refresh,
    )
