"""Options that take a list."""

import click

__all__ = ["split_durations", "split_names", "split_numbers"]


def split_names(
    ctx: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[str, ...] | None:
    """Split a comma-separated list; None stays None. A callback of ``click.option``."""
    if value is None:
        return None
    return tuple(name.strip() for name in value.split(",") if name.strip())


def split_numbers(
    ctx: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """Split a comma-separated list of whole numbers. A callback of ``click.option``."""
    names = split_names(ctx, parameter, value)
    try:
        return None if names is None else tuple(map(int, names))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of whole numbers, such as 1,2,4") from None


def split_durations(
    ctx: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[float, ...] | None:
    """Split a comma-separated list of numbers. A callback of ``click.option``."""
    names = split_names(ctx, parameter, value)
    try:
        return None if names is None else tuple(map(float, names))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of numbers, such as 0.5,1,2") from None
