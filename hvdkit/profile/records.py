"""Records of a timeline file, one at a time, however large or damaged the file is.

Horovod writes an array in Chrome's trace format, thousands of records to a line, and overwrites its
closing bracket with each. A killed job leaves half a record. Horovod does not escape names, so a
quotation mark in a tensor's name damages the records of that tensor and no others.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.errors import HvdkitError

__all__ = ["Damage", "read_records"]

CHUNK_BYTES = 1 << 20
# A record that does not end within this is none.
MOST_CHARS = 1 << 20

_START = re.compile(r'\ufeff?\s*(?:\{\s*"traceEvents"\s*:\s*)?\[')
_BETWEEN = re.compile(r"[\s,]*")
_NEXT = re.compile(r"[,\n]\s*(?=\{)")


@dataclass
class Damage:
    """What could not be read.

    Attributes:
        truncated: The file ends before its closing bracket.
        skipped: Places with something that is no record.
    """

    truncated: bool = False
    skipped: int = 0


def read_records(
    path: Path, damage: Damage, progress: Callable[[int], None] = lambda size_bytes: None
) -> Iterator[dict[str, Any]]:
    """Yield the records of a timeline in order; holds a few MiB at a time.

    Args:
        path: The file; compressed by gzip or not.
        damage: Is told what could not be read.
        progress: Called now and then with the bytes of the file that were read since.

    Raises:
        HvdkitError: The file cannot be read, is empty, or is no array of records.
    """
    chunks = _read_chunks(path, progress)
    buffer = _take_head(path, chunks)
    decode = json.JSONDecoder(parse_constant=_refuse).raw_decode
    place, ended = 0, False
    while True:
        # Records are cut out of the buffer as long as it surely holds the whole of the next one.
        while True:
            between = _BETWEEN.match(buffer, place)
            assert between is not None
            place = between.end()
            if place >= len(buffer) or buffer[place] == "]":
                break
            try:
                record, after = decode(buffer, place)
            except (ValueError, RecursionError):
                if not ended and len(buffer) - place < MOST_CHARS:
                    break  # the rest of it may come
                found = _NEXT.search(buffer, place + 1)
                if found is None and ended:
                    damage.truncated = True
                    return
                damage.skipped += 1
                place = found.end() if found else max(place + 1, len(buffer) - 16)
                continue
            place = after
            if isinstance(record, dict):
                yield record
            else:
                damage.skipped += 1
        if place < len(buffer) and buffer[place] == "]":
            return
        if ended:
            damage.truncated = True
            return
        more = next(chunks, "")
        ended = not more
        buffer, place = buffer[place:] + more, 0


def _take_head(path: Path, chunks: Iterator[str]) -> str:
    """Return the first chunk without what opens the array."""
    buffer = next(chunks, "")
    if not buffer.strip():
        raise HvdkitError(
            f"{path} is empty: Horovod writes the timeline on rank 0, from the first operation on"
        )
    start = _START.match(buffer)
    if start is None:
        raise HvdkitError(
            f"{path} is no timeline: it begins with {buffer[:20]!r}, where a timeline is an array "
            "of events; make one with HOROVOD_TIMELINE=FILE or `hvdkit profile -np N -- COMMAND`"
        )
    return buffer[start.end() :]


def _read_chunks(path: Path, progress: Callable[[int], None]) -> Iterator[str]:
    # A chunk may end within a character; names of tensors may hold any.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            unpack = zlib.decompressobj(wbits=31).decompress if packed else bytes
            while data := file.read(CHUNK_BYTES // 16 if packed else CHUNK_BYTES):
                progress(len(data))
                try:
                    text = decoder.decode(unpack(data))
                except zlib.error:
                    return  # what comes after is lost, and the array is not closed
                if text:
                    yield text
    except OSError as error:
        raise HvdkitError(f"cannot read {path}: {error.strerror}") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")
