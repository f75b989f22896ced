"""`hyperpod-ft cluster observability` and `hyperpod-ft cluster doctor`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from hyperpod_ft.cli.doctor import Report
from hyperpod_ft.cli.options import Json, Profile, Yes, interruptible, require_yes
from hyperpod_ft.cli.output.tables import print_json
from hyperpod_ft.cluster.cli.arguments import CONTINUES, DEFAULT_FILE, Cluster, NoWait, Region, Timeout, find
from hyperpod_ft.errors import UserError

if TYPE_CHECKING:
    from hyperpod_ft.cluster.observability import Extension

app = typer.Typer()


@app.command()
def observability(
    cluster: Cluster = str(DEFAULT_FILE),
    install: Annotated[bool, typer.Option("--install", help="Install it, or change its settings.")] = False,
    settings: Annotated[
        str | None, typer.Option("--settings", metavar="JSON", help="With --install: its settings, a JSON object.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove it; metrics that were sent are kept.")] = False,
    timeout: Timeout = 60.0,
    no_wait: NoWait = False,
    yes: Yes = False,
    as_json: Json = False,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Show, install or remove HyperPod's observability extension: metrics of nodes, accelerators and Slurm."""
    from hyperpod_ft.cluster import observability as extension

    access = find(cluster, region, profile)
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


@app.command()
def doctor(
    cluster: Cluster = str(DEFAULT_FILE),
    report: Report = None,
    as_json: Json = False,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Check a cluster from outside: its state, quotas, and with a cluster file all that `validate` checks."""
    from hyperpod_ft.cli.output.tables import conclude
    from hyperpod_ft.cluster import doctor as checks

    access = find(cluster, region, profile)
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
