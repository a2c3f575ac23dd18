"""Charts as SVG that stands inside a page: drawn by matplotlib, with text that stays text.

Nothing but the numbers and names of a chart goes in. Colours of text and lines are left to the
page, so that they follow its dark mode.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from hvdkit.results.report.numbers import show, show_size
from hvdkit.results.report.parts import BarChart, Chart, LineChart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["describe_chart", "draw_chart"]

# Inches of 72 units; at the width of a phone a unit is a pixel.
WIDTH, HEIGHT, ROW = 5.0, 2.9, 0.24
FONT = 12
MOST_TICKS = 7
MOST_LETTERS = 46

# Source: M. Okabe, K. Ito, Color Universal Design (2008): distinct to the colour-blind. Those that
# are hard to see on white come last.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = "osD^vPX*"
DASHES = ("-", "--", ":", "-.")
HATCHES = ("", "///", "\\\\\\", "xxx")

# Stand for the colours of the page.
INK, FAINT = "#010203", "#040506"
_PAGE_COLOURS = {INK: "currentColor", FAINT: "var(--faint)"}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.image_inline": True,
    "text.parse_math": False,
    "font.size": FONT,
    "font.family": ["DejaVu Sans"],
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": FAINT,
    "hatch.color": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
}
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


def draw_chart(chart: Chart, name: str) -> str:
    """Return a chart as an SVG element.

    Args:
        chart: What to draw.
        name: Letters and digits that no other chart of the page has; they begin every id in it.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(), warnings.catch_warnings():
        # The browser has the glyphs that matplotlib misses in its own font.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        # What the user's matplotlibrc says does not matter here.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**_STYLE, "svg.hashsalt": name})
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        if isinstance(chart, LineChart):
            _draw_lines(axes, chart)
        else:
            _draw_bars(figure, axes, chart)
        _add_legend(figure, axes)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return _adapt(written.getvalue(), chart, name)


def describe_chart(chart: Chart) -> str:
    """Say in words what a chart shows, for those who do not see it."""
    if isinstance(chart, BarChart):
        parts = ", ".join(chart.parts)
        return f"Bars of {chart.x_label} for {', '.join(chart.rows)}: {parts}."
    xs = [x for line in chart.lines for x in line.xs]
    ys = [y for line in chart.lines for y in line.ys]
    names = ", ".join(line.name for line in chart.lines)
    return (
        f"Lines of {chart.y_label} over {chart.x_label}, from {min(xs):.4g} to {max(xs):.4g}: "
        f"{names}. Lowest value {min(ys):.4g}, highest {max(ys):.4g}."
    )


def _draw_lines(axes: Axes, chart: LineChart) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

    dense = max(len(line.xs) for line in chart.lines) > 10
    for index, line in enumerate(chart.lines):
        colour = COLOURS[index % len(COLOURS)]
        axes.plot(
            line.xs,
            line.ys,
            color=colour,
            marker=MARKERS[index % len(MARKERS)],
            markevery=max(1, len(line.xs) // 6) if dense else 1,
            linestyle=DASHES[index // len(COLOURS) % len(DASHES)] if line.joined else "none",
            label=_shorten(line.name),
        )
        if line.band is not None:
            axes.fill_between(line.xs, *line.band, color=colour, alpha=0.18, linewidth=0)
    if chart.level is not None:
        name, height = chart.level
        axes.axhline(height, color=INK, linestyle="--", linewidth=1.2, label=f"{name} {height:g}")
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if chart.x_axis != "linear":
        _set_ticks(axes, sorted({x for line in chart.lines for x in line.xs}), chart.x_axis)
    if chart.y_axis == "log":
        axes.set_yscale("log")
        # matplotlib's own formatter writes powers in TeX.
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=MOST_TICKS))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: show(value)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif chart.y_axis == "share":
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    if chart.y_axis != "log" and chart.x_axis != "linear":
        axes.set_ylim(bottom=0)


def _set_ticks(axes: Axes, places: Sequence[float], kind: str) -> None:
    """Make the x axis logarithmic, and mark the values that were measured."""
    axes.set_xscale("log", base=2)
    if len(places) == 1:
        axes.set_xlim(places[0] / 2, places[0] * 2)
    span = math.log2(places[-1] / places[0]) or 1.0
    shown = [places[0]]
    for place in places[1:]:
        if math.log2(place / shown[-1]) >= span / MOST_TICKS:
            shown.append(place)
    labels = [show_size(place) if kind == "bytes" else f"{place:g}" for place in shown]
    axes.set_xticks(shown, labels)
    axes.set_xticks([], minor=True)


def _draw_bars(figure: Figure, axes: Axes, chart: BarChart) -> None:
    rows = len(chart.rows)
    bars = 1 if chart.stacked else len(chart.parts)
    figure.set_size_inches(WIDTH, 1.1 + ROW * rows * max(1.0, 0.6 * bars))
    reached = [0.0] * rows
    for index, (name, values) in enumerate(chart.parts.items()):
        lengths = [value or 0.0 for value in values]
        height = 0.8 / bars
        places = [
            row if chart.stacked else row + height * (index - (bars - 1) / 2) for row in range(rows)
        ]
        axes.barh(
            places,
            lengths,
            height,
            left=reached if chart.stacked else None,
            color=COLOURS[index % len(COLOURS)],
            hatch=HATCHES[index % len(HATCHES)],
            label=_shorten(name),
        )
        if chart.stacked:
            reached = [a + b for a, b in zip(reached, lengths, strict=True)]
    axes.set_yticks(range(rows), [_shorten(row, 24) for row in chart.rows])
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_xlabel(chart.x_label)


def _add_legend(figure: Figure, axes: Axes) -> None:
    """Put the legend below, in one column, and make room for it."""
    handles: list[Any] = [*axes.lines, *axes.containers]
    if not handles:
        return
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.23 * len(handles))
    labels = [handle.get_label() for handle in handles]
    # Names that begin with an underscore are hidden ones to matplotlib.
    labels = [f" {label}" if label.startswith("_") else label for label in labels]
    figure.legend(handles, labels, loc="outside lower left", frameon=False, fontsize=FONT - 1)


def _shorten(name: str, most: int = MOST_LETTERS) -> str:
    return name if len(name) <= most else f"{name[: most // 2]}…{name[1 - most // 2 :]}"


def _adapt(text: str, chart: Chart, name: str) -> str:
    """Make a file of matplotlib's an element of a page."""
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(text)
    for tag in ("metadata", "defs"):  # the defs that are not in a group style the whole page
        for element in root.findall(f"{{{_SVG}}}{tag}"):
            if tag == "metadata" or element.find(f"{{{_SVG}}}style") is not None:
                root.remove(element)
    for attribute in ("width", "height"):  # the page sets the width
        del root.attrib[attribute]
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title {name}-description")
    used = {
        found for element in root.iter() for value in element.attrib.values()
        for found in re.findall(r"#([\w-]+)", value)
    }  # fmt: skip
    for element in root.iter():
        for attribute, value in list(element.attrib.items()):
            if attribute == "id":
                if value in used:
                    element.set("id", f"{name}-{value}")
                else:
                    del element.attrib["id"]
            else:
                element.set(attribute, _adapt_attribute(attribute, value, name))
    for place, (tag, content) in enumerate(
        (("title", chart.title), ("desc", describe_chart(chart)))
    ):
        element = ElementTree.Element(f"{{{_SVG}}}{tag}")
        element.set("id", f"{name}-{'title' if tag == 'title' else 'description'}")
        element.text = content
        root.insert(place, element)
    return ElementTree.tostring(root, encoding="unicode")


def _adapt_attribute(attribute: str, value: str, name: str) -> str:
    """Take the page's colours, and the ids of this chart."""
    if attribute.endswith("href"):
        return f"#{name}-{value[1:]}"
    for colour, ours in _PAGE_COLOURS.items():
        value = value.replace(colour, ours)
    return value.replace("url(#", f"url(#{name}-")
