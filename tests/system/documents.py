"""What the project's Markdown pages hold: blocks of code, code within text, links, headings.

A test takes the block that it executes by its page and its first words,

    block = take_block("README.md", "hvdkit bench train --model resnet50")
    run_commands(block.commands, folder)

and code within text by ``take_inline``. ``find_claims`` reads these calls in the sources of all
tests, and ``test_documents.py`` demands that every block is in one of them: a page can name
nothing that no test executes. Both arguments are literal strings, therefore.
"""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.system.command import ROOT
from tests.system.shell import split_commands

__all__ = [
    "Block",
    "Inline",
    "find_claims",
    "list_files",
    "list_pages",
    "read_anchors",
    "read_blocks",
    "read_inlines",
    "read_links",
    "take_block",
    "take_inline",
]

_PARSER = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Block:
    """A block of code: where it stands (its first line of code), its language, what it says."""

    page: str
    line: int
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The commands of a block of shell, in order, each with its continuation lines."""
        return split_commands(self.text)


@dataclass(frozen=True)
class Inline:
    """Code within text, and about where it stands (the first line of its paragraph or row)."""

    page: str
    line: int
    text: str


def list_files(*patterns: str) -> list[str]:
    """List the project's files, from its root, those included that are not committed yet."""
    listing = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--")
    done = subprocess.run(
        [*listing, *patterns], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def list_pages() -> list[str]:
    """List the project's Markdown pages, from its root."""
    return list_files("*.md")


def _parse(page: str) -> list[Token]:
    return _PARSER.parse((ROOT / page).read_text(encoding="utf-8"))


def read_blocks(page: str) -> list[Block]:
    """Read the blocks of code of a page, those within lists too."""
    blocks = []
    for token in _parse(page):
        if token.type in ("fence", "code_block") and token.map is not None:
            line = token.map[0] + (2 if token.type == "fence" else 1)
            language = token.info.split()[0] if token.info.strip() else ""
            blocks.append(Block(page, line, language, token.content))
    return blocks


def _read_children(page: str) -> Iterator[tuple[int, Token]]:
    for token in _parse(page):
        if token.type == "inline" and token.map is not None:
            for child in token.children or ():
                yield token.map[0] + 1, child


def read_inlines(page: str) -> list[Inline]:
    """Read the code within text, lists and tables of a page."""
    return [
        Inline(page, line, " ".join(child.content.split()))
        for line, child in _read_children(page)
        if child.type == "code_inline"
    ]


def read_links(page: str) -> list[tuple[int, str]]:
    """Read where a page's links and pictures lead, each with about its line."""
    links = []
    for line, child in _read_children(page):
        target = child.attrs.get("href") or child.attrs.get("src")
        if child.type in ("link_open", "image") and target:
            links.append((line, str(target)))
    return links


def read_anchors(page: str) -> set[str]:
    """Name the headings of a page as GitHub does in its links."""
    anchors: set[str] = set()
    tokens = _parse(page)
    for opening, heading in itertools.pairwise(tokens):
        if opening.type != "heading_open":
            continue
        words = "".join(child.content for child in heading.children or ())
        name = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        number = 0
        while (anchor := f"{name}-{number}" if number else name) in anchors:
            number += 1
        anchors.add(anchor)
    return anchors


def take_block(page: str, start: str) -> Block:
    """Return the one block of a page that starts so; whoever takes it executes it.

    Raises:
        AssertionError: The page has no such block, or several.
    """
    blocks = read_blocks(page)
    found = [block for block in blocks if block.text.startswith(start)]
    starts = [block.text.partition("\n")[0] for block in blocks]
    assert len(found) == 1, f"{page}: {len(found)} blocks start with {start!r}; it has {starts}"
    return found[0]


def take_inline(page: str, text: str) -> str:
    """Return code that a page has within its text; whoever takes it executes it.

    Raises:
        AssertionError: The page has no such code.
    """
    found = [inline.text for inline in read_inlines(page)]
    assert text in found, f"{page}: no `{text}` within its text; it has {found}"
    return text


@cache
def find_claims(function: str) -> set[tuple[str, str]]:
    """Find what all tests take with ``take_block`` or ``take_inline``: page and first words."""
    claims: set[tuple[str, str]] = set()
    for name in list_files("tests/*.py"):
        source = (ROOT / name).read_text(encoding="utf-8")
        if function not in source:
            continue
        for node in ast.walk(ast.parse(source, name)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(function):
                words = [getattr(argument, "value", None) for argument in node.args]
                if len(words) == 2 and all(isinstance(word, str) for word in words):
                    claims.add((words[0], words[1]))
    return claims
