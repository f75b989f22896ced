"""An assumption of the kit about a cluster, and how doctor words what it finds: a row for each finding."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hyperpod_ft.errors import UserError
from hyperpod_ft.findings import Finding, warning

WORDS = {"ok": "ok", "error": "differs", "warning": "cannot tell"}  # by verdict


@dataclass(frozen=True)
class Assumption:
    """`name`: of the only finding of its check, and of one that fails."""

    name: str
    check: Callable[[], Finding | Iterable[Finding]]


def examine(assumptions: Sequence[Assumption]) -> list[Finding]:
    """All findings, in the order of the assumptions. A check that fails gives a warning, with the reason."""
    with ThreadPoolExecutor() as pool:
        return [row for rows in pool.map(_examine_one, assumptions) for row in rows]


def described(row: Finding) -> str:
    """A row without its name: `differs: what there is; what to do`."""
    return f"{WORDS[row.verdict]}: {row.found}" + (f"; {row.remedy}" if row.remedy else "")


def _examine_one(assumption: Assumption) -> list[Finding]:
    try:
        found = assumption.check()
        return [found] if isinstance(found, Finding) else list(found)
    except UserError as problem:
        return [warning(assumption.name, problem.problem, problem.remedy)]
    except OSError as problem:
        return [warning(assumption.name, f"{problem.filename or 'this machine'}: {problem.strerror or problem}")]
    except Exception as bug:  # such as in reading what an unknown Slurm prints: the other rows still help
        return [warning(assumption.name, f"hyperpod-ft has a bug: {bug!r}", "report it, with the text of --report")]
