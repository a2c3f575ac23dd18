"""Compatibility edits: what they are and how they are applied to Horovod's source.

An edit names the exact text that it expects. Text that is not there, or not as often as the
edit says, is an error that carries the edit's name: nothing is skipped in silence.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdkit.errors import BuildError
from hvdkit.install.versions import release

__all__ = ["Edit", "Target", "When", "apply_edits", "digest", "select_edits"]


@dataclass(frozen=True)
class Target:
    """What Horovod is built for, as far as edits depend on it.

    Attributes:
        versions: Framework name ("torch", "tensorflow") to its full version.
    """

    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class When:
    """The condition under which an edit applies; the default is always.

    Attributes:
        framework: Applies only when this framework is built for.
        at_least: And only from this release of it, for example ``(2, 19)``.
        below: And only before this release of it.
    """

    framework: str | None = None
    at_least: tuple[int, ...] = ()
    below: tuple[int, ...] = ()

    def holds(self, target: Target) -> bool:
        """Tell whether the condition holds for a target."""
        if self.framework is None:
            return True
        if self.framework not in target.versions:
            return False
        found = release(target.versions[self.framework])
        return found >= self.at_least and (not self.below or found < self.below)


@dataclass(frozen=True)
class Edit:
    """One exact replacement in one file of Horovod's source.

    Attributes:
        name: Unique, in kebab-case; shown in the plan and in errors.
        path: The file, relative to the root of the source.
        expected: The text that must be there.
        replacement: The text that takes its place.
        reason: What fails without it.
        reference: Where that is reported, or the file of the framework that shows it.
        when: The condition on the target.
        count: How often the expected text must be there; all are replaced.
    """

    name: str
    path: str
    expected: str
    replacement: str
    reason: str
    reference: str
    when: When = When()
    count: int = 1

    def apply(self, text: str) -> str:
        """Return the text with the edit made.

        Raises:
            BuildError: The expected text is not there ``count`` times.
        """
        found = text.count(self.expected)
        if found != self.count:
            raise BuildError(
                f"Edit {self.name!r} does not fit {self.path}: its text was found {found} times, "
                f"expected {self.count}. The source is not the Horovod release that hvdkit "
                "knows; use its unmodified source distribution."
            )
        return text.replace(self.expected, self.replacement)


def select_edits(edits: Iterable[Edit], target: Target) -> tuple[Edit, ...]:
    """Return the edits whose condition holds, in their order."""
    return tuple(edit for edit in edits if edit.when.holds(target))


def digest(edits: Sequence[Edit]) -> str:
    """Return a SHA-256 over everything in the edits that changes the built wheel."""
    content = hashlib.sha256()
    for edit in edits:
        for part in (edit.path, edit.expected, edit.replacement):
            content.update(part.encode() + b"\0")
    return content.hexdigest()


def apply_edits(root: Path, edits: Iterable[Edit]) -> None:
    """Make the edits in the source tree at ``root``.

    Raises:
        BuildError: A file is missing or does not hold an edit's text; says which edit.
    """
    for edit in edits:
        path = root / edit.path
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise BuildError(
                f"Edit {edit.name!r} needs {edit.path}, which the source does not have; "
                "use Horovod's unmodified source distribution."
            ) from None
        path.write_text(edit.apply(text), encoding="utf-8")
