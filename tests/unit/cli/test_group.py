"""The `hvdkit` command: what it lists, what it loads, how it fails."""

import click
import pytest
from click.testing import CliRunner

import hvdkit
from hvdkit.cli import COMMANDS, main
from hvdkit.cli.bench import COMMANDS as BENCHMARKS
from hvdkit.cli.bench import bench
from hvdkit.errors import BuildError


@pytest.mark.parametrize("name", COMMANDS)
def test_every_entry_of_the_table_is_a_command(name):
    command = main.get_command(click.Context(main), name)
    assert isinstance(command, click.Command)
    assert command.name == name
    assert command.help


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_is_a_command(name):
    command = bench.get_command(click.Context(bench), name)
    assert isinstance(command, click.Command)
    assert command.name == name
    assert command.help


def test_help_of_the_benchmarks_lists_them_all():
    result = CliRunner().invoke(main, ["bench", "--help"])
    assert result.exit_code == 0
    for name, (_, line) in BENCHMARKS.items():
        assert f"{name} " in result.output
        assert line in result.output


def test_help_lists_every_command_with_its_line():
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for name, (_, line) in COMMANDS.items():
        assert f"{name} " in result.output
        assert line in result.output


def test_version():
    result = CliRunner().invoke(main, ["--version"])
    assert result.output.strip() == f"hvdkit, version {hvdkit.__version__}"


def test_unknown_command_is_a_usage_error():
    result = CliRunner().invoke(main, ["instal"])
    assert result.exit_code == 2
    assert "No such command 'instal'" in result.output


def test_an_error_of_hvdkit_is_one_message_and_exit_1(monkeypatch):
    @click.command()
    def broken():
        raise BuildError("no compiler; install g++")

    monkeypatch.setattr("hvdkit.cli.install.install", broken)
    result = CliRunner().invoke(main, ["install"])
    assert result.exit_code == 1
    assert result.output == "Error: no compiler; install g++\n"
