"""What a log says: its last lines, and how far its stage is."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft.progress import parse_bytes
from hyperpod_ft.runs.job_files import BANNER


def growing_tails(path: Path, first: int, longest: int | None = None) -> Iterator[str]:
    """The last `first` bytes of a growing file as text, then twice as many, up to `longest` or the whole file.

    Nothing of an empty file. Its first line may lack its beginning, unless it is the whole file. Raises OSError.
    """
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        length = 0
        while length < (size if longest is None else min(size, longest)):
            length = min(size, 2 * length or first)
            stream.seek(size - length)
            yield stream.read(length).decode("utf-8", "replace")


_BLOCK_BYTES = 1 << 16
_MAX_BYTES = 1 << 22  # a log may be one endless line
_RECENT_LINES = 50

_SIZE = r"\d+\.\d [kMG]B"
_BYTES = re.compile(rf"(?P<what>[\w -]+): (?P<done>{_SIZE}) of (?P<total>{_SIZE})(?: \(\d+%\))?, (?P<rate>{_SIZE})/s")
_COUNTS = re.compile(
    r"(?:generate: |train: reference of )(?P<done>\d[\d,]*) of (?P<total>\d[\d,]*) (?:answers|\w+ rows)"
)
_SHARE = re.compile(r"tokenized [\d,]+ rows, (?P<percent>\d+)% of the data, [\d,]+ rows/s")


@dataclass(frozen=True)
class StageProgress:
    """How much of a stage's present work is done, as the newest such line of its log says."""

    fraction: float  # 0 to 1
    text: str  # that line
    seconds_left: float | None = None  # at the rate so far; None where the line has no rate in bytes


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a log; empty without one. Of a line rewritten after carriage returns, only the last text."""
    found: list[str] = []
    try:
        for text in growing_tails(path, _BLOCK_BYTES, _MAX_BYTES):
            found = text.removesuffix("\n").split("\n")
            if len(found) > lines:
                break
    except OSError:
        return []
    return [line.rstrip("\r").rpartition("\r")[2] for line in found[-lines:]]


def stage_progress(log: Path) -> StageProgress | None:
    """The newest progress in the last lines of a stage's log; None when its last attempt has none there."""
    for line in reversed(tail(log, _RECENT_LINES)):
        if BANNER.match(line):
            return None
        if found := parse_progress(line):
            return found
    return None


def parse_progress(line: str) -> StageProgress | None:
    """The progress in a line that `ByteProgress`, `report_growth`, or the stages dataset, train or generate print."""
    if match := _BYTES.fullmatch(line):
        done, total, rate = (parse_bytes(match[name]) for name in ("done", "total", "rate"))
        return StageProgress(_share(done, total), line, max(total - done, 0) / rate if rate else None)
    if match := _COUNTS.fullmatch(line):
        done, total = (float(match[name].replace(",", "")) for name in ("done", "total"))
        return StageProgress(_share(done, total), line)
    if match := _SHARE.fullmatch(line):
        return StageProgress(_share(float(match["percent"]), 100), line)
    return None


def _share(done: float, total: float) -> float:
    return min(done / total, 1.0) if total else 1.0
