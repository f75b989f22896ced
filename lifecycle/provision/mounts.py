"""Mounts, from /proc/PID/mountinfo (proc(5))."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Iterable


@dataclass(frozen=True)
class Mount:
    """One mount."""

    identity: str
    """The mount's id; another mount at the same path has another id."""
    point: str
    kind: str
    source: str
    options: str
    """Of the file system, separated by commas."""


def mount_at(point: str, mountinfo: Iterable[str]) -> Mount | None:
    """The topmost mount at that path; None if nothing is mounted there. `mountinfo`: the file's lines."""
    found = None
    for line in mountinfo:
        before, _, after = line.partition(" - ")
        fields, (kind, source, options) = before.split(" "), after.split(" ")[:3]
        if _unescaped(fields[4]) == point:
            found = Mount(fields[0], point, kind, _unescaped(source), options)
    return found


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)
