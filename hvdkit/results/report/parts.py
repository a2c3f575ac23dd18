"""What a report is made of before it becomes HTML or Markdown: sections, charts and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["BarChart", "Chart", "Line", "LineChart", "Named", "Report", "Section", "Table"]


@dataclass(frozen=True)
class Named:
    """A result that was read and checked, and what to call it."""

    name: str
    result: Mapping[str, Any]

    @property
    def summary(self) -> Mapping[str, Any]:
        """What its driver made of the samples."""
        summary: Mapping[str, Any] = self.result["summary"]
        return summary


@dataclass(frozen=True)
class Table:
    """Cells as they are shown; units are in the headings.

    Attributes:
        title: What it shows.
        headings: Of the columns.
        rows: As many cells each as there are headings.
        names: How many columns at the left are names; the others are numbers.
        folded: Whether it is long, and of interest to few.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1
    folded: bool = False


@dataclass(frozen=True)
class Line:
    """Points of a chart that belong together.

    Attributes:
        name: For the legend.
        xs: From left to right.
        ys: As many.
        band: The lowest and the highest that each y may be.
        joined: Whether a line joins the points.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None
    joined: bool = True


@dataclass(frozen=True)
class LineChart:
    """Lines over one axis.

    Attributes:
        title: What it shows.
        x_label: With the unit, as is ``y_label``.
        lines: At least one.
        x_axis: "counts" (logarithmic, of whole numbers), "bytes" (the same, of sizes) or "linear".
        y_axis: "linear", "log" or "share" (0 to 1, shown in percent).
        level: A height to compare with, and its name.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    x_axis: Literal["counts", "bytes", "linear"] = "counts"
    y_axis: Literal["linear", "log", "share"] = "linear"
    level: tuple[str, float] | None = None


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars.

    Attributes:
        title: What it shows.
        x_label: With the unit.
        rows: Names from top to bottom.
        parts: By name, a length for each row; None where there is none.
        stacked: Whether the parts of a row add up, or lie side by side.
    """

    title: str
    x_label: str
    rows: Sequence[str]
    parts: Mapping[str, Sequence[float | None]]
    stacked: bool = True


Chart = LineChart | BarChart


@dataclass(frozen=True)
class Section:
    """One subject.

    Attributes:
        title: The subject.
        charts: Of it.
        tables: The numbers of the charts, and others.
        notes: Sentences that explain them.
    """

    title: str
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """All of it.

    Attributes:
        title: The heading.
        warnings: What to know before reading on.
        sections: In order.
    """

    title: str
    warnings: Sequence[str]
    sections: Sequence[Section]
