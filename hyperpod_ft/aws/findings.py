"""What validation found: the field it is about, what is wrong, and what to do."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One problem, or one thing worth knowing. `field` is the cluster file's key, as `workers.0.instance_type`."""

    severity: Literal["error", "warning"]
    field: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.field}: {self.problem}; {self.fix}"


def error(field: str, problem: str, fix: str) -> Finding:
    return Finding("error", field, problem, fix)


def warning(field: str, problem: str, fix: str) -> Finding:
    return Finding("warning", field, problem, fix)
