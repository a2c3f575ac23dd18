"""Commands that a page names without running them: whether what they say exists.

``hvdkit`` and ``horovodrun`` are asked through their own parsers, ``make`` through the Makefile;
scripts and modules for ``python`` must be there and know the options that they are given.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import click

from hvdkit.cli import main
from tests.system.command import ROOT
from tests.system.documents import list_files

__all__ = ["find_problems", "list_options", "split_words", "variable_exists"]

ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
OPTION = re.compile(r"--?[A-Za-z][\w-]*")


def find_problems(text: str) -> list[str]:
    """Say what of the commands in ``text`` does not exist; other programs are passed over."""
    return [problem for words in split_words(text) for problem in _check(words)]


def split_words(text: str) -> list[list[str]]:
    """Split a command line into simple commands, and those into words; assignments are left out."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("();<>|&"):
            commands.append([])
        elif commands[-1] or not ASSIGNMENT.match(word):
            commands[-1].append(word)
    return [words for words in commands if words]


def _check(words: Sequence[str]) -> list[str]:
    """Check a command, or the first known one that it starts, as in ``srun hvdkit exec``."""
    words = list(words)
    if words[:1] == ["docker"] and "hvdkit" in words:
        words.remove("hvdkit")  # the image's name
    for place, word in enumerate(words):
        if (check := PROGRAMS.get(Path(word).name)) is not None:
            return check(words[place + 1 :])
    return []


def _check_hvdkit(words: list[str]) -> list[str]:
    command: click.Command = main
    ctx = click.Context(main, info_name="hvdkit", **main.context_settings)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name = words.pop(0)
        found = command.get_command(ctx, name)
        if found is None:
            return [f"{ctx.command_path} has no command {name}"]
        command, ctx = found, click.Context(found, info_name=name, parent=ctx)
    own, _, after = _partition(words)
    try:
        values, _, _ = command.make_parser(ctx).parse_args(own)
        for option in command.params:
            # Arguments and files are the reader's own; the values of other options must be right.
            own_file = isinstance(option, click.Argument) or isinstance(option.type, click.Path)
            if option.name in values and not own_file:
                option.type_cast_value(ctx, values[option.name])
    except click.UsageError as error:
        return [f"{ctx.command_path}: {error.format_message()}"]
    return _check(after)


def _partition(words: list[str]) -> tuple[list[str], list[str], list[str]]:
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place : place + 1], words[place + 1 :]


def _check_horovodrun(words: list[str]) -> list[str]:
    # A page may name an option alone: the number of workers and a last value are added.
    command, printed = _parse_horovodrun("-np", "1", *words, "1")
    return printed.splitlines()[-1:] if command is None else _check(command[:-1])


def _parse_horovodrun(*words: str) -> tuple[list[str] | None, str]:
    """Return the command that horovodrun would start, None for an error, and what it printed."""
    from horovod.runner.launch import parse_args  # without Horovod only these tests fail

    printed = io.StringIO()
    known = sys.argv
    sys.argv = ["horovodrun", *words]
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            return parse_args().command, printed.getvalue()
    except SystemExit:
        return None, printed.getvalue().strip()
    except ValueError as error:
        return None, f"horovodrun: {error}"
    finally:
        sys.argv = known


def _check_make(words: list[str]) -> list[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    problems = []
    for word in words:
        variable = ASSIGNMENT.match(word)
        if variable and f"$({variable[0][:-1]})" not in makefile:
            problems.append(f"make: the Makefile has no variable {variable[0][:-1]}")
        if not variable and not re.search(rf"^{re.escape(word)}:", makefile, re.MULTILINE):
            problems.append(f"make: the Makefile has no target {word}")
    return problems


def _check_python(words: list[str]) -> list[str]:
    if words[:1] == ["-m"]:
        if not _module_exists(words[1]):
            return [f"python: there is no module {words[1]}"]
        named = [word for word in words[2:] if "/" in word]
        return [f"python: there is no {word}" for word in named if not (ROOT / word).exists()]
    if not words or "/" not in words[0] or words[0].startswith(("-", "./")):
        return []  # the reader's own
    script = ROOT / words[0]
    if not script.is_file():
        return [f"python: there is no {words[0]}"]
    options = [match[0] for word in words[1:] if (match := OPTION.match(word))]
    source = script.read_text(encoding="utf-8")
    return [f"{words[0]} has no option {one}" for one in options if f'"{one}' not in source]


def _module_exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # nor the package that it would be in
        return False


PROGRAMS: dict[str, Callable[[list[str]], list[str]]] = {
    "hvdkit": _check_hvdkit,
    "horovodrun": _check_horovodrun,
    "make": _check_make,
    "python": _check_python,
}


@cache
def list_options() -> frozenset[str]:
    """List the options of all commands of hvdkit, and of horovodrun."""
    options = set(OPTION.findall(_parse_horovodrun("--help")[1]))
    commands: list[click.Command] = [main]
    while commands:
        command = commands.pop()
        ctx = click.Context(command, **main.context_settings)
        options.update(name for one in command.get_params(ctx) for name in one.opts)
        options.update(name for one in command.get_params(ctx) for name in one.secondary_opts)
        if isinstance(command, click.Group):
            names = command.list_commands(ctx)
            commands += filter(None, (command.get_command(ctx, name) for name in names))
    return frozenset(options)


@cache
def _read_sources() -> bytes:
    """Return what may read a variable: the project's own files, its pages left out, and Horovod."""
    files = [ROOT / name for name in list_files(":!*.md", ":!tests/system/test_documents.py")]
    spec = importlib.util.find_spec("horovod")
    for folder in (spec and spec.submodule_search_locations) or ():
        files += [*Path(folder).rglob("*.py"), *Path(folder).rglob("*.so")]
    return b"".join(path.read_bytes() for path in files)


def variable_exists(name: str) -> bool:
    """Say whether the project or Horovod knows a variable of the environment."""
    return name.encode() in _read_sources()
