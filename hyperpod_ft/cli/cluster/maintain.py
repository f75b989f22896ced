"""`hyperpod-ft cluster`: the commands that change a running cluster. boto3 is imported late."""

from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from hyperpod_ft.cli.cluster.arguments import (
    DEFAULT_FILE,
    NoWait,
    Reference,
    Region,
    RequiredReference,
    Timeout,
    access_of,
    find,
    interruptible,
)
from hyperpod_ft.cli.confirmation import require_yes
from hyperpod_ft.cli.options import Profile, Yes
from hyperpod_ft.cli.output import show_cluster
from hyperpod_ft.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hyperpod_ft.aws.cluster.access import ClusterAccess
    from hyperpod_ft.aws.hyperpod.nodes import Node

app = typer.Typer()

Group = Annotated[str, typer.Argument(help="An instance group.")]
Groups = Annotated[list[str] | None, typer.Option("--group", help="An instance group; repeatable. Default: all.")]
NodeNames = Annotated[list[str], typer.Argument(metavar="NODE...", help="Instance ids or host names.")]
After = Annotated[bool, typer.Option("--json", help="Print the cluster afterwards, as `status --json` does.")]


class Recovery(str, Enum):
    AUTOMATIC = "Automatic"
    NONE = "None"


class Patching(str, Enum):
    WHEN_IDLE = "WhenIdle"
    WHEN_ALL_IDLE = "WhenAllIdle"


@app.command()
def scale(
    cluster: RequiredReference,
    group: Group,
    count: Annotated[int, typer.Argument(min=0, help="The new number of instances.")],
    region: Region = None,
    profile: Profile = None,
    timeout: Timeout = 60.0,
    no_wait: NoWait = False,
    yes: Yes = False,
    as_json: After = False,
) -> None:
    """Change the number of instances in an instance group. To choose which to remove: delete-node."""
    from hyperpod_ft.aws.cluster import maintenance

    with _access(cluster, region, profile, as_json) as access:
        if removed := maintenance.instances_removed(access, group, count):
            _confirm(
                yes, f"{group}: HyperPod terminates {removed} of its instances, and their jobs; it chooses at random."
            )
        maintenance.scale(access, group, count, None if no_wait else timeout)


@app.command("replace-node")
def replace_node(
    cluster: RequiredReference,
    node: NodeNames,
    region: Region = None,
    profile: Profile = None,
    timeout: Timeout = 60.0,
    no_wait: NoWait = False,
    yes: Yes = False,
    as_json: After = False,
) -> None:
    """Replace nodes with new instances. Their local disks are lost; the shared volume is kept."""
    from hyperpod_ft.aws.cluster import maintenance

    with _access(cluster, region, profile, as_json) as access:
        chosen = maintenance.find_nodes(access, node)
        _confirm(
            yes, f"Replace {_names(chosen)}: their jobs are killed and local disks lost; the shared volume is kept."
        )
        maintenance.replace(access, chosen, None if no_wait else timeout)


@app.command("reboot-node")
def reboot_node(
    cluster: RequiredReference,
    node: NodeNames,
    region: Region = None,
    profile: Profile = None,
    timeout: Timeout = 30.0,
    no_wait: NoWait = False,
    yes: Yes = False,
    as_json: After = False,
) -> None:
    """Restart nodes. Their disks are kept, and the lifecycle scripts do not run."""
    from hyperpod_ft.aws.cluster import maintenance

    with _access(cluster, region, profile, as_json) as access:
        chosen = maintenance.find_nodes(access, node)
        _confirm(yes, f"Reboot {_names(chosen)}: their jobs are killed.")
        maintenance.reboot(access, chosen, None if no_wait else timeout)


@app.command("delete-node")
def delete_node(
    cluster: RequiredReference,
    node: Annotated[list[str] | None, typer.Argument(metavar="[NODE...]", help="Instance ids or host names.")] = None,
    group: Annotated[str | None, typer.Option("--group", help="Choose nodes of this group; with --count.")] = None,
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="How many nodes of --group, of those that run no job.")
    ] = None,
    region: Region = None,
    profile: Profile = None,
    timeout: Timeout = 60.0,
    no_wait: NoWait = False,
    yes: Yes = False,
    as_json: After = False,
) -> None:
    """Delete nodes; their groups get smaller. With --group and --count, Slurm is asked which ones run no job."""
    from hyperpod_ft.aws.cluster import maintenance

    if bool(node) == (group is not None and count is not None) or (group is None) != (count is None):
        raise UserError("delete-node: which nodes?", "name them, or pass --group and --count")
    with _access(cluster, region, profile, as_json) as access:
        if group is not None and count is not None:
            chosen = maintenance.nodes_without_jobs(access, group, count)
            _confirm(yes, f"Delete {_names(chosen)}, which run no job: their local disks are lost.")
            if not yes and maintenance.nodes_without_jobs(access, group, count) != chosen:
                raise UserError(f"{group}: jobs have started meanwhile", "run the command again")
        else:
            chosen = maintenance.find_nodes(access, node or [])
            _confirm(yes, f"Delete {_names(chosen)}: their jobs are killed and their local disks lost.")
        maintenance.delete_nodes(access, chosen, None if no_wait else timeout)


@app.command("delete-group")
def delete_group(
    cluster: RequiredReference,
    group: Group,
    region: Region = None,
    profile: Profile = None,
    timeout: Timeout = 60.0,
    no_wait: NoWait = False,
    yes: Yes = False,
    as_json: After = False,
) -> None:
    """Delete an instance group with its instances."""
    from hyperpod_ft.aws.cluster import maintenance

    with _access(cluster, region, profile, as_json) as access:
        removed = maintenance.instances_removed(access, group, 0)
        _confirm(yes, f"Delete group {group} with its {removed} instances: their jobs are killed, local disks lost.")
        maintenance.delete_group(access, group, None if no_wait else timeout)


@app.command()
def update(
    cluster: Reference = str(DEFAULT_FILE),
    group: Groups = None,
    release: Annotated[
        str | None, typer.Option("--release", metavar="X.Y.Z", help="Version of HyperPod's image. Default: the newest.")
    ] = None,
    image: Annotated[
        str | None, typer.Option("--image", metavar="AMI", help="A custom image instead, or `default` for HyperPod's.")
    ] = None,
    no_backup: Annotated[
        bool, typer.Option("--no-backup", help="Do not back up Slurm's queue and accounting on the controller first.")
    ] = False,
    region: Region = None,
    profile: Profile = None,
    timeout: Timeout = 120.0,
    no_wait: NoWait = False,
    yes: Yes = False,
    as_json: After = False,
) -> None:
    """Patch nodes: give them HyperPod's newest image or another, and run the lifecycle scripts again.

    Root volumes are wiped and jobs killed. A controller is first backed up to the shared volume.
    """
    from hyperpod_ft.aws.cluster import maintenance
    from hyperpod_ft.aws.hyperpod.software import LOST, LOST_ON_CONTROLLER, NodeImage

    if release and image:
        raise UserError("--release and --image exclude each other", "pass one of them")
    wanted = NodeImage(release, image)
    with _access(cluster, region, profile, as_json) as access:
        groups = maintenance.groups(access, group or [])
        maintenance.check_image(access, groups, wanted)
        controller = maintenance.has_controller(access, groups)
        lost = f"{LOST}; on the controller {LOST_ON_CONTROLLER}" if controller else LOST
        _confirm(yes, f"Update the nodes of {', '.join(groups)}: {lost}. The shared volume is kept.")
        if controller and not no_backup:
            maintenance.back_up(access)
        maintenance.update(access, groups, wanted, None if no_wait else timeout)


@app.command("auto-patch")
def auto_patch(
    cluster: RequiredReference,
    strategy: Annotated[Patching, typer.Argument(help="Each node when it is idle, or all of a group at once.")],
    group: Annotated[
        list[str] | None, typer.Option("--group", help="An instance group; repeatable. Default: all workers.")
    ] = None,
    region: Region = None,
    profile: Profile = None,
    yes: Yes = False,
    as_json: After = False,
) -> None:
    """Have HyperPod install security patches by itself once nodes run no job. It wipes what `update` wipes."""
    from hyperpod_ft.aws.cluster import maintenance

    with _access(cluster, region, profile, as_json) as access:
        groups = maintenance.workers(access, group or [])
        _confirm(yes, f"{', '.join(groups)}: HyperPod will cordon nodes and wipe their root volumes at dates it sets.")
        maintenance.set_auto_patch(access, groups, strategy.value)


@app.command("node-recovery")
def node_recovery(
    cluster: RequiredReference,
    mode: Annotated[Recovery, typer.Argument(help="Whether HyperPod replaces faulty nodes.")],
    region: Region = None,
    profile: Profile = None,
    yes: Yes = False,
    as_json: After = False,
) -> None:
    """Set whether HyperPod replaces faulty nodes by itself."""
    from hyperpod_ft.aws.cluster import maintenance

    with _access(cluster, region, profile, as_json) as access:
        if mode is Recovery.NONE:
            _confirm(yes, "Faulty nodes are then no longer replaced, and jobs that need them wait.")
        maintenance.set_node_recovery(access, mode.value)


@contextmanager
def _access(cluster: str, region: str | None, profile: str | None, as_json: bool) -> "Iterator[ClusterAccess]":
    """The cluster to change; with `as_json`, it is printed afterwards."""
    from hyperpod_ft.aws.cluster import inspection

    access = access_of(find(cluster, region), profile)
    with interruptible():
        yield access
    if as_json:
        show_cluster.status(inspection.status(access), as_json=True)


def _confirm(yes: bool, what: str) -> None:
    if not yes:
        require_yes(f"{what} Continue?")


def _names(nodes: "Sequence[Node]") -> str:
    return ", ".join(f"{one.group} {one.instance_id}" for one in nodes)
