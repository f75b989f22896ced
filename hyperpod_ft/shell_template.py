"""Jinja templates of shell text: a name that is not given is an error, and every value goes through `sh`."""

import shlex

import jinja2

from hyperpod_ft.sources import shipped


def environment() -> jinja2.Environment:
    """Of the packaged `templates/`, with the filter `sh`, which quotes a value for a shell."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(shipped("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - shell text
    )
    made.filters["sh"] = lambda value: shlex.quote(str(value))
    return made
