"""A result of validation: the field, what is wrong, and how to fix it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One error or warning. `field` is the cluster file's key, for example `workers.0.instance_type`."""

    severity: Literal["error", "warning"]
    field: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.field}: {self.problem}; {self.remedy}"


def error(field: str, problem: str, remedy: str) -> Finding:
    return Finding("error", field, problem, remedy)


def warning(field: str, problem: str, remedy: str) -> Finding:
    return Finding("warning", field, problem, remedy)
