"""The list of all runs below a root, as a page of a server that also has the page of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft.launch.status import RunStatus
from hyperpod_ft.report.html import asset, content_policy, environment
from hyperpod_ft.report.numbers import finite

_ASSETS = ("runs.js", "report.css")


@dataclass(frozen=True)
class _Row:
    """A run as the list shows it; empty and None: unknown."""

    name: str  # name/id
    state: str
    at_work: str  # on which stages, and how far
    submitted: str  # ISO 8601, UTC
    loss: float | None
    validation_loss: float | None
    cost: float | None


def runs_page(root: str, statuses: Sequence[RunStatus], refresh_seconds: int) -> str:
    """The page loads itself again every `refresh_seconds`. Its links are relative: `runs/<name>/<id>`, `compare`."""
    assets = {name: asset(name) for name in _ASSETS}
    rows = [_row(status) for status in statuses]
    return (
        environment()
        .get_template("report/runs.html.j2")
        .render(
            root=root,
            rows=rows,
            costs=any(row.cost is not None for row in rows),
            notes=list(dict.fromkeys(status.note for status in statuses if status.note)),
            assets=assets,
            policy=content_policy(assets, connects=True, forms=True),
            refresh_seconds=refresh_seconds,
        )
    )


def _row(status: RunStatus) -> _Row:
    summary = status.training_summary
    return _Row(
        name=f"{status.name}/{Path(status.directory).name}",
        state=status.state,
        at_work=", ".join(_at_work(status)),
        submitted=status.submitted,
        loss=finite(status.loss),
        validation_loss=finite(summary.validation_loss if summary else None),
        cost=summary.cost if summary else None,
    )


def _at_work(status: RunStatus) -> list[str]:
    found = []
    for stage in status.stages:
        if stage.state in ("running", "failed"):
            far = status.fraction(stage)
            found.append(stage.stage + (f" {far:.0%}" if far is not None else ""))
    return found
