"""The `hvdkit` command: a click group whose subcommands are loaded when they are used."""

import click

import hvdkit
from hvdkit.cli.lazy import LazyGroup

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "install": ("hvdkit.cli.install:install", "Build Horovod for this environment, install it."),
    "doctor": ("hvdkit.cli.doctor:doctor", "Report what is installed and whether it fits."),
    "exec": ("hvdkit.cli.exec:execute", "Be a worker under srun, mpirun or Kubernetes."),
    "check": ("hvdkit.cli.check:check", "Check the collectives under horovodrun."),
    "bench": ("hvdkit.cli.bench:bench", "Measure on this machine, against other ways."),
    "memory": ("hvdkit.cli.memory:memory", "Say what a replica of a model holds."),
    "predict": ("hvdkit.cli.predict:predict", "Say what more workers would bring."),
    "profile": ("hvdkit.cli.profile:profile", "Say where the time of a training step goes."),
    "compare": ("hvdkit.cli.compare:compare", "Say whether a result is worse than another."),
    "report": ("hvdkit.cli.report:report", "Show results in one page, or as Markdown."),
}


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hvdkit.__version__, prog_name="hvdkit")
def main() -> None:
    """Data-parallel training on Horovod for PyTorch, TensorFlow and Keras 3."""
