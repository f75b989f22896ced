"""The report as one HTML text: styles, scripts and data are inside, and nothing is loaded from elsewhere.

Everything from runs is escaped: jinja2 escapes text, `_json` the data of the charts. In addition, the page's content
security policy allows only the two scripts and the styles that it was made with.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyperpod_ft import publish
from hyperpod_ft.report import comparison, facts, headings
from hyperpod_ft.report.charts import charts
from hyperpod_ft.report.html import asset, content_policy, environment
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
    drawn = [chart.as_dict() for chart in charts(reports)]
    assets = {name: asset(name) for name in _ASSETS}
    trained = [report.training_summary for report in reports if report.training_summary]
    return (
        environment()
        .get_template("report/report.html.j2")
        .render(
            reports=reports,
            report=reports[0] if len(reports) == 1 else None,
            charts={chart["name"]: chart for chart in drawn},
            data=_json({"charts": drawn}),
            assets=assets,
            uplot_license=asset("uplot/LICENSE"),
            policy=content_policy(assets, connects=refresh_seconds is not None),
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
    )


def write_report(reports: Sequence[RunReport], path: Path) -> None:
    """Write the page; the file appears whole. Raises OSError when it cannot be written."""
    publish.write_text(path, report_page(reports))


_ASSETS = ("uplot/uPlot.iife.min.js", "report.js", "uplot/uPlot.min.css", "report.css")


def _json(value: Any) -> str:
    """JSON that cannot end the script element that holds it."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
