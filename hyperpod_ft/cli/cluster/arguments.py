"""What the commands of `hyperpod-ft cluster` have in common: their arguments, and what these name."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyperpod_ft.cli.output import show_cluster, tables

if TYPE_CHECKING:
    from hyperpod_ft.aws.cluster.access import ClusterAccess
    from hyperpod_ft.aws.cluster_reference import ClusterReference
    from hyperpod_ft.config.cluster_config import ClusterConfig
    from hyperpod_ft.progress import PrintLine

DEFAULT_FILE = Path("cluster.yaml")
File = Annotated[Path, typer.Argument(metavar="[CLUSTER_FILE]", help="A cluster file.")]
Reference = Annotated[
    str, typer.Argument(metavar="[CLUSTER]", help="A cluster file, or a cluster's name (see --region).")
]
RequiredReference = Annotated[
    str, typer.Argument(metavar="CLUSTER", help="A cluster file, or a cluster's name (see --region).")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. node_recovery=None.")
]
Legacy = Annotated[bool, typer.Option("--legacy-provisioning", help="The same as `--set provisioning=legacy`.")]
Region = Annotated[
    str | None, typer.Option("--region", help="Region of a cluster given by name. Default: the AWS CLI's.")
]
Timeout = Annotated[float, typer.Option("--timeout", metavar="MINUTES", help="How long to wait.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Send the request and return at once.")]


def load(file: Path, overrides: list[str] | None, legacy: bool) -> "ClusterConfig":
    from hyperpod_ft.config import cluster_config

    return cluster_config.load(file, (*(overrides or ()), *(("provisioning=legacy",) if legacy else ())))


def reference_of(config: "ClusterConfig", file: Path) -> "ClusterReference":
    from hyperpod_ft.aws.cluster_reference import ClusterReference

    return ClusterReference(config.name, config.region, config, str(file))


def find(reference: str, region: str | None) -> "ClusterReference":
    from hyperpod_ft.aws import cluster_reference

    return cluster_reference.find(reference, region)


def access_of(
    target: "ClusterReference", profile: str | None, report: "PrintLine" = tables.progress
) -> "ClusterAccess":
    from hyperpod_ft.aws.cluster.access import ClusterAccess

    return ClusterAccess.of(target, profile, report)


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C ends the command, not the request to AWS."""
    try:
        yield
    except KeyboardInterrupt:
        show_cluster.print_to_stderr(
            "interrupted: AWS continues, and its resources cost money; run the command again to continue,"
            " or `hyperpod-ft cluster delete` to delete them"
        )
        raise
