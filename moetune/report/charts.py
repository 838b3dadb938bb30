"""`Chart`, a figure as PNG or SVG or embedded; colours of memory parts.

Figures are drawn by matplotlib without pyplot, so that no global state is changed. The colours are those of Okabe and
Ito, which colour-blind readers can tell apart (https://jfly.uni-koeln.de/color/).
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from moetune.files import write_output
from moetune.memory.report import PartName

COLOURS: dict[PartName, str] = {
    "frozen_weights": "#0072b2",
    "trainable_weights": "#56b4e9",
    "gradients": "#d55e00",
    "optimizer_states": "#e69f00",
    "master_weights": "#cc79a7",
    "saved_activations": "#009e73",
    "transient_peak": "#f0e442",
}
INK, PAPER = "#1b1f24", "#fffffe"  # text and background; a page replaces them by its own colours, for its dark theme
_STYLE: Any = {
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "axes.facecolor": "none",
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "text.parse_math": False,  # names may contain $
    "svg.fonttype": "none",  # keep text as text, not as outlines
    "svg.hashsalt": "moetune",  # reproducible ids: equal charts give equal files
}


@dataclass(frozen=True)
class Chart:
    """A chart that is drawn when it is saved or embedded.

    Attributes:
        title: title in a page.
        size: width and height in inches.
        draw: draws the chart on an empty figure.
        heading: text above the chart in a saved file; if empty, the title.
    """

    title: str
    size: tuple[float, float]
    draw: Callable[[Figure], None]
    heading: str = ""

    def save(self, path: Path) -> None:
        """Write the chart to a `.png` or `.svg` file.

        Raises:
            UserError: the file cannot be written, or exists and was not written by moetune.
        """
        write_output(path, self._rendered(path.suffix.lower()[1:], self.heading or self.title))

    def svg(self) -> str:
        """Return an `<svg>` element without a title, with the text and background colours of the page around it."""
        svg = self._rendered("svg").decode()
        return svg[svg.index("<svg") :].replace(INK, "var(--ink)").replace(PAPER, "var(--paper)")

    def _rendered(self, kind: str, heading: str = "") -> bytes:
        """Return the chart as a file of format `kind`, `png` or `svg`."""
        content = io.BytesIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type")) if kind == "svg" else {"Software": "moetune"}
        with matplotlib.rc_context(_STYLE):
            figure = Figure(self.size, layout="constrained", facecolor=PAPER)
            self.draw(figure)
            if heading:
                figure.suptitle(heading, x=0.01, ha="left", fontsize=12, fontweight="bold")
            figure.savefig(content, format=kind, dpi=150, facecolor=PAPER, metadata=metadata)
        # like the comment in a page and the metadata of a PNG, it identifies the file as written by moetune
        return content.getvalue().replace(b"<svg", b"<!-- written by moetune -->\n<svg", kind == "svg")
