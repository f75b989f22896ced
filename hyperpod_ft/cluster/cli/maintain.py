"""`hyperpod-ft cluster`: the commands that change a running cluster. boto3 is imported late."""

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from hyperpod_ft.cluster.cli.arguments import Change, change
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


@change(app)
def scale(
    given: Change,
    group: Group,
    count: Annotated[int, typer.Argument(min=0, help="The new number of instances.")],
) -> None:
    """Change the number of instances in an instance group. To choose which to remove: delete-node."""
    from hyperpod_ft.cluster import maintenance

    if removed := maintenance.instances_removed(given.access, group, count):
        given.confirm(f"{group}: HyperPod terminates {removed} of its instances, and their jobs; it chooses at random.")
    maintenance.scale(given.access, group, count, given.wait)


@change(app, "replace-node")
def replace_node(given: Change, node: NodeNames) -> None:
    """Replace nodes with new instances. Their local disks are lost; the shared volume is kept."""
    from hyperpod_ft.cluster import maintenance

    chosen = maintenance.find_nodes(given.access, node)
    given.confirm(f"Replace {_names(chosen)}: their jobs are killed and local disks lost; the shared volume is kept.")
    maintenance.replace(given.access, chosen, given.wait)


@change(app, "reboot-node", minutes=30.0)
def reboot_node(given: Change, node: NodeNames) -> None:
    """Restart nodes. Their disks are kept, and the lifecycle scripts do not run."""
    from hyperpod_ft.cluster import maintenance

    chosen = maintenance.find_nodes(given.access, node)
    given.confirm(f"Reboot {_names(chosen)}: their jobs are killed.")
    maintenance.reboot(given.access, chosen, given.wait)


@change(app, "delete-node")
def delete_node(
    given: Change,
    node: Annotated[list[str] | None, typer.Argument(metavar="[NODE...]", help="Instance ids or host names.")] = None,
    group: Annotated[str | None, typer.Option("--group", help="Choose nodes of this group; with --count.")] = None,
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="How many nodes of --group, of those that run no job.")
    ] = None,
) -> None:
    """Delete nodes; their groups get smaller. With --group and --count, Slurm is asked which ones run no job."""
    from hyperpod_ft.cluster import controller, maintenance

    if bool(node) == (group is not None and count is not None) or (group is None) != (count is None):
        raise UserError("delete-node: which nodes?", "name them, or pass --group and --count")
    if group is not None and count is not None:
        chosen = controller.nodes_without_jobs(given.access, group, count)
        given.confirm(f"Delete {_names(chosen)}, which run no job: their local disks are lost.")
        if not given.yes and controller.nodes_without_jobs(given.access, group, count) != chosen:
            raise UserError(f"{group}: jobs have started meanwhile", "run the command again")
    else:
        chosen = maintenance.find_nodes(given.access, node or [])
        given.confirm(f"Delete {_names(chosen)}: their jobs are killed and their local disks lost.")
    maintenance.delete_nodes(given.access, chosen, given.wait)


@change(app, "delete-group")
def delete_group(given: Change, group: Group) -> None:
    """Delete an instance group with its instances."""
    from hyperpod_ft.cluster import maintenance

    removed = maintenance.instances_removed(given.access, group, 0)
    given.confirm(f"Delete group {group} with its {removed} instances: their jobs are killed, local disks lost.")
    maintenance.delete_group(given.access, group, given.wait)


@change(app, minutes=120.0, named=False)
def update(
    given: Change,
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

    if release and image:
        raise UserError("--release and --image exclude each other", "pass one of them")
    wanted = NodeImage(release, image)
    groups = maintenance.groups(given.access, group or [])
    maintenance.check_image(given.access, groups, wanted)
    with_controller = maintenance.has_controller(given.access, groups)
    lost = f"{LOST_BY_UPDATE}; on the controller {LOST_WITH_CONTROLLER}" if with_controller else LOST_BY_UPDATE
    given.confirm(f"Update the nodes of {', '.join(groups)}: {lost}. The shared volume is kept.")
    if with_controller and not no_backup:
        controller.back_up(given.access)
    maintenance.update(given.access, groups, wanted, given.wait)


@change(app, "auto-patch", minutes=None)
def auto_patch(
    given: Change,
    strategy: Annotated[Patching, typer.Argument(help="Each node when it is idle, or all of a group at once.")],
    group: Annotated[
        list[str] | None, typer.Option("--group", help="An instance group; repeatable. Default: all workers.")
    ] = None,
) -> None:
    """Have HyperPod install security patches by itself once nodes run no job. It wipes what `update` wipes."""
    from hyperpod_ft.cluster import maintenance

    groups = maintenance.workers(given.access, group or [])
    given.confirm(f"{', '.join(groups)}: HyperPod will cordon nodes and wipe their root volumes at dates it sets.")
    maintenance.set_auto_patch(given.access, groups, strategy.value)


@change(app, "node-recovery", minutes=None)
def node_recovery(
    given: Change,
    mode: Annotated[Recovery, typer.Argument(help="Whether HyperPod replaces faulty nodes.")],
) -> None:
    """Set whether HyperPod replaces faulty nodes by itself."""
    from hyperpod_ft.cluster import maintenance

    if mode is Recovery.NONE:
        given.confirm("Faulty nodes are then no longer replaced, and jobs that need them wait.")
    maintenance.set_node_recovery(given.access, mode.value)


def _names(nodes: "Sequence[Node]") -> str:
    return ", ".join(f"{one.group} {one.instance_id}" for one in nodes)
