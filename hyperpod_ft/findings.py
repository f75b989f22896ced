"""What a check found: the rows of `doctor`, and the errors and warnings of `cluster validate`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from hyperpod_ft.errors import UserError


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


def refuse_errors(findings: Sequence[Finding], report: Callable[[str], object]) -> None:
    """Raise UserError for the first error; the other findings are reported, a line each."""
    first = next((finding for finding in findings if finding.verdict == "error"), None)
    for finding in findings:
        if finding is not first:
            report(str(finding))
    if first:
        raise UserError(f"{first.name}: {first.found}", first.remedy)
