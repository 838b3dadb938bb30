"""Charts, as files and in pages. Drawn without pyplot, so nothing global is left behind.

Colours are Okabe and Ito's, which colour-blind readers can tell apart (https://jfly.uni-koeln.de/color/).
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from moetune.errors import UserError
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
INK, PAPER = "#1b1f24", "#fffffe"  # replaced by a page's own colours, so that charts follow a dark theme
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
    "text.parse_math": False,  # a name may hold a $
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "moetune",  # the same chart gives the same file
}


@dataclass(frozen=True)
class Chart:
    """A chart, drawn when it is written.

    Attributes:
        size: width and height, inches.
        draw: draws it on an empty figure.
        heading: what a file has above it; by default the title.
    """

    title: str
    size: tuple[float, float]
    draw: Callable[[Figure], None]
    heading: str = ""

    def save(self, path: Path) -> None:
        """Write a PNG or SVG, by the file's suffix.

        Raises:
            UserError: the suffix is another one, or the file cannot be written.
        """
        refuse_unknown_format(path)
        write_output(path, self._rendered(path.suffix.lower()[1:], self.heading or self.title))

    def svg(self) -> str:
        """Return an `<svg>` element without the title, in the page's own colours."""
        svg = self._rendered("svg").decode()
        return svg[svg.index("<svg") :].replace(INK, "var(--ink)").replace(PAPER, "var(--paper)")

    def _rendered(self, kind: str, heading: str = "") -> bytes:
        content = io.BytesIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type")) if kind == "svg" else {"Software": "moetune"}
        with matplotlib.rc_context(_STYLE):
            figure = Figure(self.size, layout="constrained", facecolor=PAPER)
            self.draw(figure)
            if heading:
                figure.suptitle(heading, x=0.01, ha="left", fontsize=12, fontweight="bold")
            figure.savefig(content, format=kind, dpi=150, facecolor=PAPER, metadata=metadata)
        # as the page's own comment and PNG's metadata, this tells a picture of ours from others'
        return content.getvalue().replace(b"<svg", b"<!-- written by moetune -->\n<svg", kind == "svg")


def refuse_unknown_format(path: Path) -> None:
    """Refuse a path whose suffix is not of a picture that can be written."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise UserError(f"cannot draw {str(path)!r}: a figure is .png or .svg, not {path.suffix or 'without suffix'!r}")
