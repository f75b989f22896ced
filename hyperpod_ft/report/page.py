"""The report as one HTML text: styles, scripts and data are inside, and nothing is loaded from elsewhere.

Everything from runs is escaped: jinja2 escapes text, `_json` the data of the charts. In addition, the page's content
security policy allows only the two scripts and the styles that it was made with.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperpod_ft import publish
from hyperpod_ft.report import findings, numbers
from hyperpod_ft.report.charts import charts
from hyperpod_ft.report.differences import differences
from hyperpod_ft.report.run_report import ACTIVITIES, RunReport
from hyperpod_ft.runs.results.figures import table
from hyperpod_ft.shipped import shipped

if TYPE_CHECKING:
    import jinja2

_ANSWERS = 100  # shown; the rest is in samples.json
_CHARACTERS = 2_000  # shown of each text


def report_page(reports: Sequence[RunReport], *, refresh_seconds: int | None = None) -> str:
    """The page about one run, or about several side by side.

    `refresh_seconds`: the page, from a server, loads itself again this often; None: it makes no request.
    """
    drawn = [chart.as_dict() for chart in charts(reports)]
    assets = {name: _asset(name) for name in _ASSETS}
    trained = [report.figures for report in reports if report.figures]
    return (
        _environment()
        .get_template("report/report.html.j2")
        .render(
            reports=reports,
            report=reports[0] if len(reports) == 1 else None,
            charts={chart["name"]: chart for chart in drawn},
            data=_json({"charts": drawn}),
            assets=assets,
            policy=_policy(assets, refresh_seconds is not None),
            refresh_seconds=refresh_seconds,
            findings=findings,
            comparison=list(table(trained)) if trained and len(reports) > 1 else [],
            differences=differences(reports),
            answers_shown=_ANSWERS,
            activities=ACTIVITIES,
        )
    )


def write_report(reports: Sequence[RunReport], path: Path) -> None:
    """Write the page; the file appears whole. Raises OSError when it cannot be written."""
    publish.write_text(path, report_page(reports))


_ASSETS = ("uplot/uPlot.iife.min.js", "report.js", "uplot/uPlot.min.css", "report.css")


@cache
def _asset(name: str) -> str:
    return (shipped("templates") / "report" / name).read_text(encoding="utf-8")


@cache
def _environment() -> "jinja2.Environment":
    import jinja2  # noqa: PLC0415 - commands that write no report start without it

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(shipped("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    environment.filters |= {
        "duration": numbers.duration,
        "number": numbers.number,
        "percent": numbers.percent,
        "clip": _clip,
    }
    return environment


def _clip(text: str) -> str:
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]} … ({len(text):,} characters)"


def _json(value: Any) -> str:
    """JSON that cannot end the script element that holds it."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _policy(assets: Mapping[str, str], refreshed: bool) -> str:
    def allowed(suffix: str) -> str:
        digests = (hashlib.sha256(text.encode()).digest() for name, text in assets.items() if name.endswith(suffix))
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    connect = "'self'" if refreshed else "'none'"
    return (
        f"default-src 'none'; script-src {allowed('.js')}; style-src {allowed('.css')}; connect-src {connect};"
        " base-uri 'none'; form-action 'none'"
    )
