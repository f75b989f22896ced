"""The user's Jinja templates over a raw row's fields, sandboxed."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import StrictUndefined, Template, UndefinedError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hyperpod_ft.data.text.example import RowError
from hyperpod_ft.errors import UserError


@lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    # The run file may come from someone else: in the sandbox its templates cannot reach Python's internals.
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(source)


def fill(key: str, source: str, row: Mapping[str, Any]) -> str:
    """The template `source` of `dataset.<key>`, rendered.

    Raises RowError, or UserError when it tries to leave the sandbox.
    """
    template = _compile(source)
    try:
        return template.render(dict(row))
    except SecurityError as error:
        raise UserError(f"dataset.{key}: {error}", "use the row's fields only") from error
    except UndefinedError as error:
        raise RowError("undefined in template", f"{key}: {error}") from error
    except Exception as error:  # the template's expressions may raise anything
        raise RowError("template fails", f"{key}: {type(error).__name__}: {error}") from error
