"""What the commands of `hyperpod-ft cluster` have in common: which cluster their arguments name, and how they wait."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hyperpod_ft.cli.options import Profile, Yes, interruptible, require_yes
from hyperpod_ft.cli.output import tables
from hyperpod_ft.cluster.cli import show as show_cluster

if TYPE_CHECKING:
    from hyperpod_ft.cluster.access import ClusterAccess
    from hyperpod_ft.progress import PrintLine

CONTINUES = (
    "AWS continues, and its resources cost money; run the command again to continue, or `hyperpod-ft cluster delete` to"
    " delete them"
)
DEFAULT_FILE = Path("cluster.yaml")
File = Annotated[Path, typer.Argument(metavar="[CLUSTER_FILE]", help="A cluster file.")]
Cluster = Annotated[str, typer.Argument(metavar="CLUSTER", help="A cluster file, or a cluster's name (see --region).")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. node_recovery=None.")
]
Region = Annotated[
    str | None, typer.Option("--region", help="Region of a cluster given by name. Default: the AWS CLI's.")
]
Timeout = Annotated[float, typer.Option("--timeout", metavar="MINUTES", help="How long to wait.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Send the request and return at once.")]
After = Annotated[bool, typer.Option("--json", help="Print the cluster afterwards, as `status --json` does.")]

Command = Callable[..., None]


@dataclass(frozen=True)
class Change:
    """What a command that changes a cluster is given. `timeout`: in minutes; None: do not wait."""

    access: "ClusterAccess"
    timeout: float | None
    yes: bool

    def confirm(self, what: str) -> None:
        require_yes(f"{what} Continue?", self.yes)


def command(
    app: typer.Typer, name: str | None = None, report: "PrintLine" = tables.progress
) -> Callable[[Command], Command]:
    """Make a command of a function of a ClusterAccess, and of arguments of its own, after CLUSTER."""

    def add(function: Command) -> Command:
        def run(cluster: str, region: str | None, profile: str | None, **own: Any) -> None:
            access = _find(cluster, region, profile, report)
            with access.explained():
                function(access, **own)

        return _add(app, name, function, run, str(DEFAULT_FILE), [])

    return add


def changing(
    app: typer.Typer, name: str | None = None, minutes: float | None = None, default: Path | None = None
) -> Callable[[Command], Command]:
    """Make a command of a function of a Change, and of arguments of its own, after CLUSTER.

    `minutes`: how long it waits, unless the user says otherwise. `default`: of CLUSTER, which is else required.
    """

    def add(function: Command) -> Command:
        def run(
            cluster: str,
            region: str | None,
            profile: str | None,
            yes: bool,
            as_json: bool,
            timeout: float | None = None,
            no_wait: bool = False,
            **own: Any,
        ) -> None:
            from hyperpod_ft.cluster import inspection

            access = _find(cluster, region, profile, tables.progress)
            with access.explained():
                with interruptible(CONTINUES):
                    function(Change(access, None if no_wait else timeout, yes), **own)
                if as_json:
                    show_cluster.status(inspection.status(access), as_json=True)

        waiting = [_argument("timeout", Timeout, minutes), _argument("no_wait", NoWait, False)] if minutes else []
        more = [*waiting, _argument("yes", Yes, False), _argument("as_json", After, False)]
        return _add(app, name, function, run, str(default) if default else inspect.Parameter.empty, more)

    return add


def _add(
    app: typer.Typer, name: str | None, function: Command, run: Command, default: Any, more: list[inspect.Parameter]
) -> Command:
    """Have typer see `run` with the arguments of `function` beside those that all have."""
    _, *own = inspect.signature(function).parameters.values()
    common = [_argument("region", Region, None), _argument("profile", Profile, None)]
    arguments = [_argument("cluster", Cluster, default), *own, *common, *more]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined] # functions may have it
        [argument.replace(kind=inspect.Parameter.KEYWORD_ONLY) for argument in arguments]
    )
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    return app.command(name)(run)


def _argument(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _find(cluster: str, region: str | None, profile: str | None, report: "PrintLine") -> "ClusterAccess":
    """The cluster that a command's arguments name."""
    from hyperpod_ft.cluster import config
    from hyperpod_ft.cluster.access import ClusterAccess

    return ClusterAccess.of(config.find(cluster, region), profile, report)
