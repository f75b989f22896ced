"""What is mounted where (proc(5), /proc/PID/mountinfo)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Iterable


@dataclass(frozen=True)
class Mount:
    """One mount, as the kernel tells it."""

    identity: str
    """Its number; another mount at the same place has another."""
    point: str
    kind: str
    source: str


def mount_at(point: str, mountinfo: Iterable[str]) -> Mount | None:
    """The uppermost mount at that path; None when nothing is mounted there. `mountinfo`: the file's lines."""
    found = None
    for line in mountinfo:
        before, _, after = line.partition(" - ")
        fields, (kind, source) = before.split(" "), after.split(" ")[:2]
        if _unescaped(fields[4]) == point:
            found = Mount(fields[0], point, kind, _unescaped(source))
    return found


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)
