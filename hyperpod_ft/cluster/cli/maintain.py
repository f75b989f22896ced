"""`hyperpod-ft cluster`: the commands that change a running cluster. boto3 is imported late."""

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from hyperpod_ft.cli.options import Profile, Yes, require_yes
from hyperpod_ft.cluster.cli.arguments import DEFAULT_FILE, After, Cluster, NoWait, Region, Timeout, changing
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


@app.command()
def scale(
    cluster: Cluster,
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
    from hyperpod_ft.cluster import maintenance

    with changing(cluster, region, profile, as_json) as access:
        if removed := maintenance.instances_removed(access, group, count):
            _confirm(
                f"{group}: HyperPod terminates {removed} of its instances, and their jobs; it chooses at random.", yes
            )
        maintenance.scale(access, group, count, None if no_wait else timeout)


@app.command("replace-node")
def replace_node(
    cluster: Cluster,
    node: NodeNames,
    region: Region = None,
    profile: Profile = None,
    timeout: Timeout = 60.0,
    no_wait: NoWait = False,
    yes: Yes = False,
    as_json: After = False,
) -> None:
    """Replace nodes with new instances. Their local disks are lost; the shared volume is kept."""
    from hyperpod_ft.cluster import maintenance

    with changing(cluster, region, profile, as_json) as access:
        chosen = maintenance.find_nodes(access, node)
        _confirm(
            f"Replace {_names(chosen)}: their jobs are killed and local disks lost; the shared volume is kept.", yes
        )
        maintenance.replace(access, chosen, None if no_wait else timeout)


@app.command("reboot-node")
def reboot_node(
    cluster: Cluster,
    node: NodeNames,
    region: Region = None,
    profile: Profile = None,
    timeout: Timeout = 30.0,
    no_wait: NoWait = False,
    yes: Yes = False,
    as_json: After = False,
) -> None:
    """Restart nodes. Their disks are kept, and the lifecycle scripts do not run."""
    from hyperpod_ft.cluster import maintenance

    with changing(cluster, region, profile, as_json) as access:
        chosen = maintenance.find_nodes(access, node)
        _confirm(f"Reboot {_names(chosen)}: their jobs are killed.", yes)
        maintenance.reboot(access, chosen, None if no_wait else timeout)


@app.command("delete-node")
def delete_node(
    cluster: Cluster,
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
    from hyperpod_ft.cluster import controller, maintenance

    with changing(cluster, region, profile, as_json) as access:
        if bool(node) == (group is not None and count is not None) or (group is None) != (count is None):
            raise UserError("delete-node: which nodes?", "name them, or pass --group and --count")
        if group is not None and count is not None:
            chosen = controller.nodes_without_jobs(access, group, count)
            _confirm(f"Delete {_names(chosen)}, which run no job: their local disks are lost.", yes)
            if not yes and controller.nodes_without_jobs(access, group, count) != chosen:
                raise UserError(f"{group}: jobs have started meanwhile", "run the command again")
        else:
            chosen = maintenance.find_nodes(access, node or [])
            _confirm(f"Delete {_names(chosen)}: their jobs are killed and their local disks lost.", yes)
        maintenance.delete_nodes(access, chosen, None if no_wait else timeout)


@app.command("delete-group")
def delete_group(
    cluster: Cluster,
    group: Group,
    region: Region = None,
    profile: Profile = None,
    timeout: Timeout = 60.0,
    no_wait: NoWait = False,
    yes: Yes = False,
    as_json: After = False,
) -> None:
    """Delete an instance group with its instances."""
    from hyperpod_ft.cluster import maintenance

    with changing(cluster, region, profile, as_json) as access:
        removed = maintenance.instances_removed(access, group, 0)
        _confirm(f"Delete group {group} with its {removed} instances: their jobs are killed, local disks lost.", yes)
        maintenance.delete_group(access, group, None if no_wait else timeout)


@app.command()
def update(
    cluster: Cluster = str(DEFAULT_FILE),
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
    from hyperpod_ft.cluster import controller, maintenance
    from hyperpod_ft.cluster.maintenance import LOST_BY_UPDATE, LOST_WITH_CONTROLLER, NodeImage

    with changing(cluster, region, profile, as_json) as access:
        if release and image:
            raise UserError("--release and --image exclude each other", "pass one of them")
        wanted = NodeImage(release, image)
        groups = maintenance.groups(access, group or [])
        maintenance.check_image(access, groups, wanted)
        with_controller = maintenance.has_controller(access, groups)
        lost = f"{LOST_BY_UPDATE}; on the controller {LOST_WITH_CONTROLLER}" if with_controller else LOST_BY_UPDATE
        _confirm(f"Update the nodes of {', '.join(groups)}: {lost}. The shared volume is kept.", yes)
        if with_controller and not no_backup:
            controller.back_up(access)
        maintenance.update(access, groups, wanted, None if no_wait else timeout)


@app.command("auto-patch")
def auto_patch(
    cluster: Cluster,
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
    from hyperpod_ft.cluster import maintenance

    with changing(cluster, region, profile, as_json) as access:
        groups = maintenance.workers(access, group or [])
        _confirm(f"{', '.join(groups)}: HyperPod will cordon nodes and wipe their root volumes at dates it sets.", yes)
        maintenance.set_auto_patch(access, groups, strategy.value)


@app.command("node-recovery")
def node_recovery(
    cluster: Cluster,
    mode: Annotated[Recovery, typer.Argument(help="Whether HyperPod replaces faulty nodes.")],
    region: Region = None,
    profile: Profile = None,
    yes: Yes = False,
    as_json: After = False,
) -> None:
    """Set whether HyperPod replaces faulty nodes by itself."""
    from hyperpod_ft.cluster import maintenance

    with changing(cluster, region, profile, as_json) as access:
        if mode is Recovery.NONE:
            _confirm("Faulty nodes are then no longer replaced, and jobs that need them wait.", yes)
        maintenance.set_node_recovery(access, mode.value)


def _names(nodes: "Sequence[Node]") -> str:
    return ", ".join(f"{one.group} {one.instance_id}" for one in nodes)


def _confirm(what: str, yes: bool) -> None:
    require_yes(f"{what} Continue?", yes)
