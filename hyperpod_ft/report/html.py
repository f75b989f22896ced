"""What pages have in common: their templates, the files that are put into them, and what they may load."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from hyperpod_ft.data.inspection import shown
from hyperpod_ft.report import numbers
from hyperpod_ft.shipped import shipped

if TYPE_CHECKING:
    import jinja2

_CHARACTERS = 2_000  # shown of each text


@cache
def asset(name: str) -> str:
    """A script or style of `templates/report/`."""
    return (shipped("templates") / "report" / name).read_text(encoding="utf-8")


def page(template: str, assets: Sequence[str], *, connects: bool, forms: bool = False, **values: Any) -> str:
    """What a template of `templates/report/` makes of the values, with these scripts and styles of that folder in it.

    `connects`, `forms`: as in `content_policy`.
    """
    contents = {name: asset(name) for name in assets}
    policy = content_policy(contents, connects=connects, forms=forms)
    return _environment().get_template(f"report/{template}.html.j2").render(assets=contents, policy=policy, **values)


@cache
def _environment() -> "jinja2.Environment":
    """The templates. Text is escaped unless a template says otherwise."""
    import jinja2  # noqa: PLC0415 - commands that write no report start without it

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(shipped("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    made.filters |= {
        "duration": numbers.duration,
        "number": numbers.number,
        "moment": numbers.moment,
        "percent": numbers.percent,
        "clip": _clip,
        "line_breaks": _line_breaks,
    }
    made.globals |= {"meanings": shown.MEANINGS, "heading": shown.heading, "tallies": shown.tallies}
    return made


def content_policy(assets: Mapping[str, str], *, connects: bool, forms: bool = False) -> str:
    """The content security policy of a page with these scripts and styles: it runs no others and loads nothing.

    `connects`: it may ask the server that it came from; `forms`: and send it forms.
    """

    def allowed(suffix: str) -> str:
        digests = (hashlib.sha256(text.encode()).digest() for name, text in assets.items() if name.endswith(suffix))
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {allowed('.js')}; style-src {allowed('.css')};"
        f" img-src data:; connect-src {_own(connects)}; base-uri 'none'; form-action {_own(forms)}"
    )


def _own(allowed: bool) -> str:
    return "'self'" if allowed else "'none'"


def _line_breaks(text: str) -> str:
    """Visible, since they may be trained."""
    return text.replace("\n", "↵\n")


def _clip(text: str) -> str:
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]} … ({len(text):,} characters)"
