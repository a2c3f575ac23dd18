"""A group of commands that are loaded when they are used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

from hvdkit.errors import HvdkitError

__all__ = ["LazyGroup"]


class LazyGroup(click.Group):
    """A group that imports a subcommand's module only when that subcommand runs.

    Args:
        lazy: Name -> (module and attribute, the line that the group's help shows). The line
            stands there so that the help loads no subcommand.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]], **options: Any) -> None:
        super().__init__(*args, **options)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one subcommand."""
        if cmd_name not in self._lazy:
            return None
        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._lazy.items()])

    def invoke(self, ctx: click.Context) -> object:
        """Run the subcommand; an error that hvdkit raised on purpose is one message, exit 1."""
        try:
            return super().invoke(ctx)
        except HvdkitError as error:
            raise click.ClickException(str(error)) from error
