"""One thing that the doctor found."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Level"]

Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """What was found about one topic.

    Attributes:
        topic: One or two words, for example "horovod" or "ssh".
        level: "fault" when training cannot work, "warning" when it may not, otherwise "ok".
        text: What was found.
        remedy: What to do about it, or "".
    """

    topic: str
    level: Level
    text: str
    remedy: str = ""
