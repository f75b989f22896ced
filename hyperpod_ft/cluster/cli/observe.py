"""`hyperpod-ft cluster observability` and `hyperpod-ft cluster doctor`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from hyperpod_ft.cli.doctor import Report
from hyperpod_ft.cli.options import Json, Yes, interruptible, require_yes
from hyperpod_ft.cli.output.tables import print_json
from hyperpod_ft.cluster.cli.arguments import CONTINUES, NoWait, Timeout, command
from hyperpod_ft.errors import UserError

if TYPE_CHECKING:
    from hyperpod_ft.cluster.access import ClusterAccess
    from hyperpod_ft.cluster.observability import Extension

app = typer.Typer()


@command(app)
def observability(
    access: "ClusterAccess",
    install: Annotated[bool, typer.Option("--install", help="Install it, or change its settings.")] = False,
    settings: Annotated[
        str | None, typer.Option("--settings", metavar="JSON", help="With --install: its settings, a JSON object.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove it; metrics that were sent are kept.")] = False,
    timeout: Timeout = 60.0,
    no_wait: NoWait = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Show, install or remove HyperPod's observability extension: metrics of nodes, accelerators and Slurm."""
    from hyperpod_ft.cluster import observability as extension

    if (install and remove) or (settings is not None and not install):
        raise UserError("observability: --install, with or without --settings, or --remove", "pass one of them")
    wait = None if no_wait else timeout
    with interruptible(CONTINUES):
        if install:
            extension.install(access, settings, wait)
        elif remove:
            require_yes("Remove the observability extension from every node?", yes)
            extension.remove(access, wait)
    _show(extension.installed(access), as_json)


@command(app)
def doctor(access: "ClusterAccess", report: Report = None, as_json: Json = False) -> None:
    """Check a cluster from outside: its state, quotas, and with a cluster file all that `validate` checks."""
    from hyperpod_ft.cli.output.tables import conclude
    from hyperpod_ft.cluster import doctor as checks

    conclude(checks.cluster(access), report, as_json)


def _show(installed: "Extension | None", as_json: bool) -> None:
    if as_json:
        print_json(installed and asdict(installed))
    elif installed is None:
        print("not installed")
    else:
        print(f"{installed.version}  {installed.status}  {installed.active} of {installed.total} nodes")
        for line in (*installed.issues, installed.settings):
            if line:
                print(line)
