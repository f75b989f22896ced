"""What the commands of `hyperpod-ft cluster` have in common: their arguments, and what these name.

A command on an existing cluster lists its own options only: `on_cluster` and `change` add those that all such commands
have, and give it the cluster instead of them.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hyperpod_ft.cli.options import Profile, Yes, interruptible, require_yes
from hyperpod_ft.cli.output import tables
from hyperpod_ft.cluster.cli import show as show_cluster

if TYPE_CHECKING:
    from hyperpod_ft.cluster.access import ClusterAccess
    from hyperpod_ft.cluster.config import ClusterConfig, ClusterReference
    from hyperpod_ft.progress import PrintLine

CONTINUES = (
    "AWS continues, and its resources cost money; run the command again to continue, or `hyperpod-ft cluster delete` to"
    " delete them"
)
DEFAULT_FILE = Path("cluster.yaml")
File = Annotated[Path, typer.Argument(metavar="[CLUSTER_FILE]", help="A cluster file.")]
Reference = Annotated[
    str, typer.Argument(metavar="CLUSTER", help="A cluster file, or a cluster's name (see --region).")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. node_recovery=None.")
]
Region = Annotated[
    str | None, typer.Option("--region", help="Region of a cluster given by name. Default: the AWS CLI's.")
]
Timeout = Annotated[float, typer.Option("--timeout", metavar="MINUTES", help="How long to wait.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Send the request and return at once.")]
After = Annotated[bool, typer.Option("--json", help="Print the cluster afterwards, as `status --json` does.")]


def load(file: Path, overrides: list[str] | None) -> "ClusterConfig":
    from hyperpod_ft.cluster import config as cluster_config

    return cluster_config.load(file, overrides or ())


def reference_of(config: "ClusterConfig", file: Path) -> "ClusterReference":
    from hyperpod_ft.cluster.config import ClusterReference

    return ClusterReference(config.name, config.region, config, str(file))


def find(reference: str, region: str | None) -> "ClusterReference":
    from hyperpod_ft.cluster import config as cluster_config

    return cluster_config.find(reference, region)


def access_of(
    target: "ClusterReference", profile: str | None, report: "PrintLine" = tables.progress
) -> "ClusterAccess":
    from hyperpod_ft.cluster.access import ClusterAccess

    return ClusterAccess.of(target, profile, report)


@dataclass(frozen=True)
class Change:
    """A cluster to change, for how many minutes to wait for it (None: not at all), and whether --yes was given."""

    access: "ClusterAccess"
    wait: float | None
    yes: bool

    def confirm(self, what: str) -> None:
        """Ask the user, unless --yes was given. Raises UserError or typer's Exit."""
        require_yes(f"{what} Continue?", self.yes)


def on_cluster(
    app: typer.Typer, name: str | None = None, report: "PrintLine" = tables.progress
) -> Callable[[Callable[..., None]], None]:
    """Make a function a command on an existing cluster: its first parameter is the `ClusterAccess`."""

    def register(function: Callable[..., None]) -> None:
        def run(
            cluster: Reference = str(DEFAULT_FILE), *, region: Region = None, profile: Profile = None, **own: Any
        ) -> None:
            function(access_of(find(cluster, region), profile, report), **own)

        _register(app, name, run, function)

    return register


def change(
    app: typer.Typer, name: str | None = None, *, minutes: float | None = 60.0, named: bool = True
) -> Callable[[Callable[..., None]], None]:
    """Make a function a command that changes a cluster: its first parameter is the `Change`.

    `minutes`: how long it waits by default; None: it has nothing to wait for. `named`: the cluster must be given.
    """

    def register(function: Callable[..., None]) -> None:
        def run(
            cluster: Reference = str(DEFAULT_FILE),
            *,
            region: Region = None,
            profile: Profile = None,
            timeout: Timeout = minutes or 0.0,
            no_wait: NoWait = minutes is None,
            yes: Yes = False,
            as_json: After = False,
            **own: Any,
        ) -> None:
            from hyperpod_ft.cluster import inspection

            access = access_of(find(cluster, region), profile)
            with interruptible(CONTINUES):
                function(Change(access, None if no_wait else timeout, yes), **own)
            if as_json:
                show_cluster.status(inspection.status(access), as_json=True)

        _register(app, name, run, function, named=named, hidden=() if minutes else ("timeout", "no_wait"))

    return register


def _register(
    app: typer.Typer,
    name: str | None,
    run: Callable[..., None],
    function: Callable[..., None],
    *,
    named: bool = False,
    hidden: Sequence[str] = (),
) -> None:
    """Register `run` with the help of `function`, whose own parameters typer sees after the cluster."""
    cluster, *shared, _ = inspect.signature(run).parameters.values()
    _, *own = inspect.signature(function).parameters.values()
    seen = [cluster.replace(default=cluster.empty) if named else cluster, *own]
    seen += [one for one in shared if one.name not in hidden]
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    signature = inspect.Signature([one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in seen])
    run.__signature__ = signature  # type: ignore[attr-defined]
    app.command(name)(run)
