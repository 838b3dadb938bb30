"""Views of `moetune adapter check` and `moetune adapter diff`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from moetune.errors import counted, first_of
from moetune.report.view import Table, View, ViewSection

if TYPE_CHECKING:
    from moetune.adapters.check import AdapterReport, Covered
    from moetune.adapters.difference import AdapterDifference


def report_view(report: AdapterReport) -> View:
    """Return the view of `moetune adapter check`: verdict, what would be lost, the factors by projection or linear
    layer, summed over the model's layers, and the programs that can read the adapter."""
    ill = bool(report.problems)
    verdict = (
        f"no: {counted(len(report.problems), 'problem')}" if ill else "yes: all of it belongs to the base, and is read"
    )
    about = [("base", report.base), ("adapter", report.adapter)]
    if report.layout is not None:
        about.append(("layout", f"{report.layout}: {'; '.join(report.reasons)}"))
    sections = []
    if ill:
        sections.append(ViewSection("What would be lost", first_of(report.problems, 20)))
    if report.covered:
        headings = ("part", ">layers", ">experts of each", ">zero", ">rank", ">scale")
        sections.append(ViewSection("What it has", Table(headings, _rows(report.covered))))
    if report.saved:
        sections.append(ViewSection("Whole weights", first_of(report.saved, 10)))
    if report.missing:
        sections.append(ViewSection("Without factors, which other layers have", first_of(report.missing, 10)))
    programs = [(name, "yes" if reason is None else reason) for name, reason in report.programs.items()]
    sections.append(ViewSection("Read as it is by", Table(("program", ""), programs)))
    return View("Adapter", verdict, "no" if ill else "yes", about=about, sections=sections)


def difference_view(diff: AdapterDifference) -> View:
    """Return the view of `moetune adapter diff`: verdict, the first 20 updates that differ and by how much, and the
    first names that only one of the adapters has."""
    sections = []
    if diff.differing:
        rows = [
            (
                update.name + (f"\nexperts {_ids(update.experts)}" if update.experts else ""),
                f"{update.relative:.3g}",
                update.because or "",
            )
            for update in diff.differing[:20]
        ]
        sections.append(ViewSection("Differing", Table(("part", ">relative", "the same but for"), rows)))
    for title, names in (("Only in A", diff.only_a), ("Only in B", diff.only_b)):
        if names:
            sections.append(ViewSection(title, first_of(names, 10)))
    same = f"the same: {counted(diff.compared, 'update')} compared"
    verdict = same if diff.equal else f"different: {counted(len(diff.differing), 'part')} of {diff.compared}"
    return View(
        "Two adapters",
        verdict,
        "yes" if diff.equal else "no",
        about=[("A", diff.a), ("B", diff.b)],
        sections=sections,
    )


def _rows(covered: Iterable[Covered]) -> list[tuple[str, ...]]:
    """Return rows (part, layers, experts in each, experts that are zero, rank, scale), summed over the model's layers.

    A part is a projection of experts or the last name of a linear layer; it has a row for each rank and scale.
    """
    groups: Mapping[tuple[str, int, float], list[Covered]] = defaultdict(list)
    for update in covered:
        kind = "experts, " if update.experts is not None else ""
        groups[kind + update.name.rpartition(".")[2], update.rank, update.scale].append(update)
    rows: list[tuple[str, ...]] = []
    for (name, rank, scale), own in groups.items():
        of_experts = [len(update.experts) for update in own if update.experts is not None]
        zero = sum(len(update.zero) for update in own)
        rows.append((name, str(len(own)), _range(of_experts), str(zero), str(rank), f"{scale:g}"))
    return rows


def _range(numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    return str(numbers[0]) if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


def _ids(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids[:8])) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
