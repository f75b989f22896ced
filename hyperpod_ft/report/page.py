"""Pages about runs, the report and the list of all runs, each as one HTML text: styles, scripts and data are inside,
and nothing is loaded from elsewhere.

Everything from runs is escaped: jinja2 escapes text, `_json` the data of the charts. In addition, the page's content
security policy allows only the scripts and the styles that it was made with.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyperpod_ft import publish
from hyperpod_ft.launch.status import RunStatus
from hyperpod_ft.report import comparison, facts, headings
from hyperpod_ft.report.charts import charts
from hyperpod_ft.report.html import asset, page
from hyperpod_ft.report.numbers import finite
from hyperpod_ft.report.run_report import ACTIVITIES, RunReport
from hyperpod_ft.runs.results.training_summary import table

_ANSWERS = 100  # shown; the rest is in samples.json


def report_page(
    reports: Sequence[RunReport], *, refresh_seconds: int | None = None, all_runs: str | None = None
) -> str:
    """The page about one run, or about several side by side.

    `refresh_seconds`: the page, from a server, loads itself again this often; None: it makes no request. `all_runs`:
    the address of the list of all runs, if there is one.
    """
    drawn = [asdict(chart) for chart in charts(reports)]
    trained = [report.training_summary for report in reports if report.training_summary]
    return page(
        "report",
        ("uplot/uPlot.iife.min.js", "report.js", "uplot/uPlot.min.css", "report.css"),
        connects=refresh_seconds is not None,
        reports=reports,
        report=reports[0] if len(reports) == 1 else None,
        charts={chart["name"]: chart for chart in drawn},
        data=_json({"charts": drawn}),
        uplot_license=asset("uplot/LICENSE"),
        refresh_seconds=refresh_seconds,
        all_runs=all_runs,
        headings=headings,
        facts=facts,
        comparison=comparison,
        summary_table=list(table(trained)) if trained and len(reports) > 1 else [],
        differences=comparison.differences([report.settings for report in reports]),
        answers_shown=_ANSWERS,
        activities=ACTIVITIES,
    )


def write_report(reports: Sequence[RunReport], path: Path) -> None:
    """Write the page; the file appears whole. Raises OSError when it cannot be written."""
    publish.write_text(path, report_page(reports))


def _json(value: Any) -> str:
    """JSON that cannot end the script element that holds it."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


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
    """The list of all runs below a root, as a page of a server that also has the page of each.

    It loads itself again every `refresh_seconds`. Its links are relative: `runs/<name>/<id>`, `compare`.
    """
    rows = [_row(status) for status in statuses]
    return page(
        "runs",
        ("runs.js", "report.css"),
        connects=True,
        forms=True,
        root=root,
        rows=rows,
        costs=any(row.cost is not None for row in rows),
        notes=list(dict.fromkeys(status.note for status in statuses if status.note)),
        refresh_seconds=refresh_seconds,
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
