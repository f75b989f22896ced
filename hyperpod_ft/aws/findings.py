"""A result of validation: the field, what is wrong, and how to fix it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One error or warning. `field` is the cluster file's key, for example `workers.0.instance_type`."""

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
