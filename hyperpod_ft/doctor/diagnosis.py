"""An assumption of the kit, and the diagnosis: whether it holds here. Each diagnosis is a row of what doctor prints."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from hyperpod_ft.errors import UserError


@dataclass(frozen=True)
class Diagnosis:
    """`found` says what is there; `remedy` what to do, if it differs from what the kit assumes."""

    name: str
    verdict: Literal["ok", "differs", "cannot tell"]
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        if self.verdict == "ok":
            return f"ok: {self.found}"
        return f"{self.verdict}: {self.found}" + (f"; {self.remedy}" if self.remedy else "")


def ok(name: str, found: str) -> Diagnosis:
    return Diagnosis(name, "ok", found)


def differs(name: str, found: str, remedy: str) -> Diagnosis:
    return Diagnosis(name, "differs", found, remedy)


def unknown(name: str, found: str, remedy: str = "") -> Diagnosis:
    return Diagnosis(name, "cannot tell", found, remedy)


@dataclass(frozen=True)
class Assumption:
    """What to look at. It may give several diagnoses; `name` is that of the only one, and of a failure to look."""

    name: str
    look: Callable[[], Diagnosis | Iterable[Diagnosis]]


def examine(assumptions: Sequence[Assumption]) -> list[Diagnosis]:
    """All diagnoses, in the order of the assumptions. What cannot be looked at is `cannot tell`, with the reason."""
    with ThreadPoolExecutor() as pool:
        return [row for rows in pool.map(_look, assumptions) for row in rows]


def _look(assumption: Assumption) -> list[Diagnosis]:
    try:
        found = assumption.look()
        return [found] if isinstance(found, Diagnosis) else list(found)
    except UserError as error:
        return [unknown(assumption.name, error.problem, error.remedy)]
    except OSError as error:
        return [unknown(assumption.name, f"{error.filename or 'this machine'}: {error.strerror or error}")]
    except Exception as error:  # a bug, such as in reading what an unknown Slurm prints: the other rows still help
        return [unknown(assumption.name, f"hyperpod-ft has a bug: {error!r}", "report it, with the text of --report")]
