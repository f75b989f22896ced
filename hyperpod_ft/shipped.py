"""Where the kit's own files are: those shipped with it, the templates of shell text, and the user's state."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jinja2

PACKAGE = Path(__file__).resolve().parent


def shipped(folder: str) -> Path:
    """A folder of the repository that the wheel carries inside the package (`templates`, `examples`, `lifecycle`)."""
    inside = PACKAGE / folder
    return inside if inside.is_dir() else PACKAGE.parent / folder


def importing_the_kit(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which a program of any interpreter imports this copy of the kit; `environment`: the others."""
    path = filter(None, (str(PACKAGE.parent), environment.get("PYTHONPATH")))
    return {**environment, "PYTHONPATH": os.pathsep.join(path)}


def installing(extra: str, python: str = "") -> str:
    """How to install an extra of the kit, which is on no package index; `python`: the environment's interpreter."""
    return f"in the kit's clone, {f'{python} -m ' if python else ''}pip install -c constraints.txt '.[{extra}]'"


def state_directory() -> Path:
    """The kit's folder in the user's state directory ($XDG_STATE_HOME); it may not exist yet."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "hyperpod-ft"


def shell_templates() -> "jinja2.Environment":
    """The packaged `templates/`. An undefined name is an error; the filter `sh` quotes a value for a shell."""
    # commands that render nothing start without jinja2
    import jinja2  # noqa: PLC0415

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(shipped("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - shell text
    )
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    return environment
