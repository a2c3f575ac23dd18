"""A report as one HTML page that needs nothing but itself."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from hvdkit.errors import HvdkitError
from hvdkit.results.report.parts import Report

__all__ = ["require_libraries", "write_page"]

_LIBRARIES = {"matplotlib", "jinja2"}


def require_libraries() -> None:
    """Raise unless the libraries that a page is made with are installed.

    Raises:
        HvdkitError: Names the missing one and says how to install it.
    """
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in _LIBRARIES:
            raise
        raise HvdkitError(
            f"a page needs {error.name}, which is not installed; run: pip install "
            "'hvdkit[report]', or write Markdown (-o report.md), which needs nothing"
        ) from None


def write_page(report: Report) -> str:
    """Return a report as HTML, with every chart as SVG in it.

    Raises:
        HvdkitError: As ``require_libraries``.
    """
    require_libraries()
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    from hvdkit.results.report.charts import draw_chart

    numbers = count(1)

    def draw(chart: object) -> Markup:
        return Markup(draw_chart(chart, f"chart{next(numbers)}"))  # type: ignore[arg-type]

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    source = Path(__file__).with_name("page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(source).render(report=report, draw=draw)
