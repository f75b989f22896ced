"""A check that a cluster is as the kit assumes, and how doctor words what it finds: a row for each finding."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hyperpod_ft.errors import UserError
from hyperpod_ft.findings import Finding, warning

WORDS = {"ok": "ok", "error": "differs", "warning": "cannot tell"}  # by verdict


@dataclass(frozen=True)
class DoctorCheck:
    """`name`: the finding's, if the check gives a single one; also that of the warning when the check fails."""

    name: str
    run: Callable[[], Finding | Iterable[Finding]]


def run_checks(checks: Sequence[DoctorCheck]) -> list[Finding]:
    """All findings, in the order of the checks. A check that fails gives a warning, with the reason."""
    with ThreadPoolExecutor() as pool:
        return [row for rows in pool.map(_run, checks) for row in rows]


def described(row: Finding) -> str:
    """A row without its name: `differs: what there is; what to do`."""
    return f"{WORDS[row.verdict]}: {row.found}" + (f"; {row.remedy}" if row.remedy else "")


def _run(check: DoctorCheck) -> list[Finding]:
    try:
        found = check.run()
        return [found] if isinstance(found, Finding) else list(found)
    except UserError as problem:
        return [warning(check.name, problem.problem, problem.remedy)]
    except OSError as problem:
        return [warning(check.name, f"{problem.filename or 'this machine'}: {problem.strerror or problem}")]
    except Exception as bug:  # such as in reading what an unknown Slurm prints: the other rows still help
        return [warning(check.name, f"hyperpod-ft has a bug: {bug!r}", "report it, with the text of --report")]
