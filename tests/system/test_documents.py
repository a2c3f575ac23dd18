"""No page can rot: each block of code is executed by a test, and what its text names exists.

A test executes a block of a page by taking it with ``take_block`` (``documents.py`` says how):
README.md and CONTRIBUTING.md in ``test_document_blocks.py``, what needs an image in
``tests/image``, several hosts in ``tests/multihost``, a scheduler in ``tests/cluster``.
"""

import posixpath
import re
from urllib.parse import unquote, urlsplit

import pytest

from tests.system.command import ROOT
from tests.system.document_commands import (
    find_problems,
    list_options,
    split_words,
    variable_exists,
)
from tests.system.documents import (
    find_claims,
    list_pages,
    read_anchors,
    read_blocks,
    read_inlines,
    read_links,
    take_block,
    take_inline,
)
from tests.system.shell import split_commands

PAGES = list_pages()
LANGUAGES = {"diff", "dockerfile", "json", "python", "sh", "text", "yaml"}
# Programs that are not asked for their options: what the text tells them must be executed.
FOREIGN = {"docker", "helm", "kubectl", "mpiexec", "mpirun", "sbatch"}
# Options that the text names alone, of other programs.
FOREIGN_OPTIONS = {"--constraint": "pip", "--network": "docker"}
PLACES = (
    "in tests/system/test_document_blocks.py; for containers, several hosts or schedulers in "
    "tests/image, tests/multihost or tests/cluster."
)


@pytest.fixture(scope="module")
def shell():
    """Give the commands in blocks of shell: (page, line, command) of every page."""
    return [
        (page, block.line, command)
        for page in PAGES
        for block in read_blocks(page)
        if block.language == "sh"
        for command in block.commands
    ]


@pytest.mark.parametrize("page", PAGES)
def test_each_block_is_executed_by_a_test(page):
    starts = [start for name, start in find_claims("take_block") if name == page]
    for block in read_blocks(page):
        first = block.text.partition("\n")[0]
        assert block.language in LANGUAGES, (
            f"{page}:{block.line}: the block that starts with {first!r} says {block.language!r} "
            f"for its language; say one of {', '.join(sorted(LANGUAGES))} (sh for commands, text "
            "for what they print)."
        )
        assert any(block.text.startswith(start) for start in starts), (
            f"{page}:{block.line}: no test executes the block that starts with {first!r}. Add one "
            f'that runs take_block("{page}", "...") {PLACES}'
        )


def test_what_tests_take_is_there():
    for page, start in find_claims("take_block"):
        take_block(page, start)
    for page, text in find_claims("take_inline"):
        take_inline(page, text)


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist_as_they_are_written(page, shell):
    """Those of blocks too, which a test may run with smaller numbers."""
    named = [(inline.line, inline.text) for inline in read_inlines(page)]
    named += [(line, command) for name, line, command in shell if name == page]
    problems = [
        f"{page}:{line}: {text}: {problem}"
        for line, text in named
        for problem in find_problems(text)
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_other_programs_are_executed(page, shell):
    executed = {text for name, text in find_claims("take_inline") if name == page}
    executed |= {" ".join(command.split()) for _, _, command in shell}
    for inline in read_inlines(page):
        for words in split_words(inline.text):
            assert words[0] not in FOREIGN or len(words) == 1 or inline.text in executed, (
                f"{page}:{inline.line}: no test executes `{inline.text}`. Say it as some block "
                f'does, or add a test that runs take_inline("{page}", "{inline.text}") {PLACES}'
            )


@pytest.mark.parametrize("page", PAGES)
def test_options_and_variables_exist(page, shell):
    """Those that the text names alone: of hvdkit, of horovodrun, or in a block of the page."""
    commands = " ".join(command for name, _, command in shell if name == page)
    known = {*list_options(), *re.split(r"[\s=]", commands), *FOREIGN_OPTIONS}
    for inline in read_inlines(page):
        where = f"{page}:{inline.line}: `{inline.text}`"
        for variable in re.findall(r"\b(?:HOROVOD|HVDKIT)_[A-Z_]*[A-Z]", inline.text):
            assert variable_exists(variable), f"{where}: nothing reads {variable}"
        option = re.match(r"--?[a-z][\w-]*", inline.text)
        assert option is None or option[0] in known, (
            f"{where}: no option of hvdkit or horovodrun, and in no block of {page}. One of "
            "another program belongs into FOREIGN_OPTIONS in tests/system/test_documents.py."
        )


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    for line, link in read_links(page):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        where = f"{page}:{line}: the link to {link}"
        target = page
        if parts.path:
            target = posixpath.normpath(
                posixpath.join(posixpath.dirname(page), unquote(parts.path))
            )
        assert (ROOT / target).exists(), f"{where}: there is no {target}"
        if parts.fragment and target.endswith(".md"):
            assert parts.fragment in read_anchors(target), (
                f"{where}: {target} has no such heading; it has {sorted(read_anchors(target))}"
            )


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("hvdkit bench trai", "no command trai"),
        ("hvdkit bench train --modl mlp", "No such option '--modl'"),
        ("hvdkit bench train --steps many", "not a valid integer"),
        ("make demo && hvdkit doctor --nosuch", "No such option '--nosuch'"),
        ("srun -n 2 hvdkit install --gpu nosuch", "is not 'nccl'"),
        ("horovodrun -np 2 --nosuch python train.py", "unrecognized arguments: --nosuch"),
        ("horovodrun -np 2 python examples/nosuch.py", "no examples/nosuch.py"),
        ("hvdkit profile -np 2 -- python -m tests.nosuch.module", "no module tests.nosuch.module"),
        ("A=1 python examples/torch/digits.py --nosuch", "no option --nosuch"),
        ("docker run hvdkit python examples/nosuch.py", "no examples/nosuch.py"),
        ("make nosuch", "no target nosuch"),
        ("make test NOSUCH=1", "no variable NOSUCH"),
        ("make test REQUIRE=browser", None),
        ("A=1 horovodrun -np 2 --gloo python examples/torch/digits.py --epochs 1", None),
        ("horovodrun --gloo-timeout-seconds", None),
        ("hvdkit report RESULT... -o report.html", None),
    ],
)
def test_what_does_not_exist_is_found(command, problem):
    found = " ".join(find_problems(command))
    assert found == "" if problem is None else problem in found


def test_a_variable_that_nothing_reads_is_found():
    assert variable_exists("HOROVOD_SPIN_WAIT")
    assert not variable_exists("HOROVOD_" + "NOSUCH")


def test_commands_are_read_whole():
    text = "# first\na b \\\n  c  # said\n\nd 'e\nf'\n"
    assert split_commands(text) == ["a b \\\n  c  # said", "d 'e\nf'"]
