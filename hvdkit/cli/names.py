"""Options that take a list of names."""

import click

__all__ = ["split_names"]


def split_names(
    ctx: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[str, ...] | None:
    """Split a comma-separated list; None stays None. A callback of ``click.option``."""
    if value is None:
        return None
    return tuple(name.strip() for name in value.split(",") if name.strip())
