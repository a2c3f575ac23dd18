"""The `hvdkit` command: a click group whose subcommands are loaded when they are used."""

import importlib

import click

import hvdkit
from hvdkit.errors import HvdkitError

__all__ = ["COMMANDS", "LazyGroup", "main"]

# Name -> (where the command is, the line that `hvdkit --help` shows). The line stands here so
# that the help loads no subcommand.
COMMANDS = {
    "install": ("hvdkit.cli.install:install", "Build Horovod for this environment, install it."),
    "doctor": ("hvdkit.cli.doctor:doctor", "Report what is installed and whether it fits."),
    "check": ("hvdkit.cli.check:check", "Check the collectives under horovodrun."),
    "bench": ("hvdkit.cli.bench:bench", "Measure training speed against other ways."),
    "compare": ("hvdkit.cli.compare:compare", "Say whether a result is worse than another."),
}


class LazyGroup(click.Group):
    """A group that imports a subcommand's module only when that subcommand runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one subcommand."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        """Run the subcommand; an error that hvdkit raised on purpose is one message, exit 1."""
        try:
            return super().invoke(ctx)
        except HvdkitError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hvdkit.__version__, prog_name="hvdkit")
def main() -> None:
    """Data-parallel training on Horovod for PyTorch, TensorFlow and Keras 3."""
