"""What the commands of `hyperpod-ft cluster` have in common: their arguments, and the cluster that these name."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyperpod_ft.cli.options import interruptible
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


def find(
    cluster: str, region: str | None, profile: str | None, report: "PrintLine" = tables.progress
) -> "ClusterAccess":
    """The cluster that a command's arguments name."""
    from hyperpod_ft.cluster import config
    from hyperpod_ft.cluster.access import ClusterAccess

    return ClusterAccess.of(config.find(cluster, region), profile, report)


@contextmanager
def changing(cluster: str, region: str | None, profile: str | None, as_json: bool) -> Iterator["ClusterAccess"]:
    """The cluster, for a block that changes it; prints it afterwards if that was asked for."""
    from hyperpod_ft.cluster import inspection

    access = find(cluster, region, profile)
    with interruptible(CONTINUES):
        yield access
    if as_json:
        show_cluster.status(inspection.status(access), as_json=True)
