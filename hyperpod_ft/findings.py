"""What a check found: the rows of `doctor`, and the errors and warnings of `cluster validate`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """`name`: what was checked: a row of doctor, or a key of the cluster file such as `workers.0.instance_type`.

    error: it is not as the kit needs it. warning: it may not be, or that could not be checked.
    """

    name: str
    verdict: Literal["ok", "error", "warning"]
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.verdict}: {self.name}: {self.found}{remedy}"


def ok(name: str, found: str) -> Finding:
    return Finding(name, "ok", found)


def error(name: str, found: str, remedy: str) -> Finding:
    return Finding(name, "error", found, remedy)


def warning(name: str, found: str, remedy: str = "") -> Finding:
    return Finding(name, "warning", found, remedy)
