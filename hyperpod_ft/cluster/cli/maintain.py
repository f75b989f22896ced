"""`hyperpod-ft cluster`: the commands that change a running cluster. boto3 is imported late."""

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from hyperpod_ft.cluster.cli.arguments import DEFAULT_FILE, Change, changing
from hyperpod_ft.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyperpod_ft.cluster.hyperpod.api import Node

app = typer.Typer()

Group = Annotated[str, typer.Argument(help="An instance group.")]
Groups = Annotated[list[str] | None, typer.Option("--group", help="An instance group; repeatable. Default: all.")]
NodeNames = Annotated[list[str], typer.Argument(metavar="NODE...", help="Instance ids or host names.")]


class Recovery(str, Enum):
    AUTOMATIC = "Automatic"
    NONE = "None"


class Patching(str, Enum):
    WHEN_IDLE = "WhenIdle"
    WHEN_ALL_IDLE = "WhenAllIdle"


@changing(app, minutes=60.0)
def scale(
    change: Change,
    group: Group,
    count: Annotated[int, typer.Argument(min=0, help="The new number of instances.")],
) -> None:
    """Change the number of instances in an instance group. To choose which to remove: delete-node."""
    from hyperpod_ft.cluster import maintenance

    access = change.access
    if removed := maintenance.instances_removed(access, group, count):
        change.confirm(
            f"{group}: HyperPod terminates {removed} of its instances, and their jobs; it chooses at random."
        )
    maintenance.scale(access, group, count, change.timeout)


@changing(app, "replace-node", minutes=60.0)
def replace_node(change: Change, node: NodeNames) -> None:
    """Replace nodes with new instances. Their local disks are lost; the shared volume is kept."""
    from hyperpod_ft.cluster import maintenance

    access = change.access
    chosen = maintenance.find_nodes(access, node)
    change.confirm(f"Replace {_names(chosen)}: their jobs are killed and local disks lost; the shared volume is kept.")
    maintenance.replace(access, chosen, change.timeout)


@changing(app, "reboot-node", minutes=30.0)
def reboot_node(change: Change, node: NodeNames) -> None:
    """Restart nodes. Their disks are kept, and the lifecycle scripts do not run."""
    from hyperpod_ft.cluster import maintenance

    access = change.access
    chosen = maintenance.find_nodes(access, node)
    change.confirm(f"Reboot {_names(chosen)}: their jobs are killed.")
    maintenance.reboot(access, chosen, change.timeout)


@changing(app, "delete-node", minutes=60.0)
def delete_node(
    change: Change,
    node: Annotated[list[str] | None, typer.Argument(metavar="[NODE...]", help="Instance ids or host names.")] = None,
    group: Annotated[str | None, typer.Option("--group", help="Choose nodes of this group; with --count.")] = None,
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="How many nodes of --group, of those that run no job.")
    ] = None,
) -> None:
    """Delete nodes; their groups get smaller. With --group and --count, Slurm is asked which ones run no job."""
    from hyperpod_ft.cluster import controller, maintenance

    access = change.access
    if bool(node) == (group is not None and count is not None) or (group is None) != (count is None):
        raise UserError("delete-node: which nodes?", "name them, or pass --group and --count")
    if group is not None and count is not None:
        chosen = controller.nodes_without_jobs(access, group, count)
        change.confirm(f"Delete {_names(chosen)}, which run no job: their local disks are lost.")
        if not change.yes and controller.nodes_without_jobs(access, group, count) != chosen:
            raise UserError(f"{group}: jobs have started meanwhile", "run the command again")
    else:
        chosen = maintenance.find_nodes(access, node or [])
        change.confirm(f"Delete {_names(chosen)}: their jobs are killed and their local disks lost.")
    maintenance.delete_nodes(access, chosen, change.timeout)


@changing(app, "delete-group", minutes=60.0)
def delete_group(change: Change, group: Group) -> None:
    """Delete an instance group with its instances."""
    from hyperpod_ft.cluster import maintenance

    access = change.access
    removed = maintenance.instances_removed(access, group, 0)
    change.confirm(f"Delete group {group} with its {removed} instances: their jobs are killed, local disks lost.")
    maintenance.delete_group(access, group, change.timeout)


@changing(app, minutes=120.0, default=DEFAULT_FILE)
def update(
    change: Change,
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
) -> None:
    """Patch nodes: give them HyperPod's newest image or another, and run the lifecycle scripts again.

    Root volumes are wiped and jobs killed. A controller is first backed up to the shared volume.
    """
    from hyperpod_ft.cluster import controller, maintenance
    from hyperpod_ft.cluster.maintenance import LOST_BY_UPDATE, LOST_WITH_CONTROLLER, NodeImage

    access = change.access
    if release and image:
        raise UserError("--release and --image exclude each other", "pass one of them")
    wanted = NodeImage(release, image)
    groups = maintenance.groups(access, group or [])
    maintenance.check_image(access, groups, wanted)
    with_controller = maintenance.has_controller(access, groups)
    lost = f"{LOST_BY_UPDATE}; on the controller {LOST_WITH_CONTROLLER}" if with_controller else LOST_BY_UPDATE
    change.confirm(f"Update the nodes of {', '.join(groups)}: {lost}. The shared volume is kept.")
    if with_controller and not no_backup:
        controller.back_up(access)
    maintenance.update(access, groups, wanted, change.timeout)


@changing(app, "auto-patch")
def auto_patch(
    change: Change,
    strategy: Annotated[Patching, typer.Argument(help="Each node when it is idle, or all of a group at once.")],
    group: Annotated[
        list[str] | None, typer.Option("--group", help="An instance group; repeatable. Default: all workers.")
    ] = None,
) -> None:
    """Have HyperPod install security patches by itself once nodes run no job. It wipes what `update` wipes."""
    from hyperpod_ft.cluster import maintenance

    access = change.access
    groups = maintenance.workers(access, group or [])
    change.confirm(f"{', '.join(groups)}: HyperPod will cordon nodes and wipe their root volumes at dates it sets.")
    maintenance.set_auto_patch(access, groups, strategy.value)


@changing(app, "node-recovery")
def node_recovery(
    change: Change,
    mode: Annotated[Recovery, typer.Argument(help="Whether HyperPod replaces faulty nodes.")],
) -> None:
    """Set whether HyperPod replaces faulty nodes by itself."""
    from hyperpod_ft.cluster import maintenance

    access = change.access
    if mode is Recovery.NONE:
        change.confirm("Faulty nodes are then no longer replaced, and jobs that need them wait.")
    maintenance.set_node_recovery(access, mode.value)


def _names(nodes: "Sequence[Node]") -> str:
    return ", ".join(f"{one.group} {one.instance_id}" for one in nodes)
