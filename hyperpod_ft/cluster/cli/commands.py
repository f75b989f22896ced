"""`hyperpod-ft cluster`: each command parses, calls one function and prints. boto3 is imported late."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyperpod_ft.cli.doctor import Report
from hyperpod_ft.cli.init import copy_example
from hyperpod_ft.cli.options import Confirm, Json, Profile, Yes, command_group, interruptible, require_name, require_yes
from hyperpod_ft.cli.output import tables
from hyperpod_ft.cluster.cli import maintain
from hyperpod_ft.cluster.cli import show as show_cluster
from hyperpod_ft.cluster.cli.arguments import CONTINUES, DEFAULT_FILE, File, NoWait, Overrides, Timeout, command
from hyperpod_ft.errors import ConfigError, UserError

if TYPE_CHECKING:
    from hyperpod_ft.cluster.access import ClusterAccess

app = typer.Typer(
    name="cluster",
    help="Create, validate, connect to, change and delete a HyperPod cluster.",
    cls=command_group(
        headings={
            "The cluster": "init plans validate create status doctor delete",
            "Its nodes": "ssh logs events replace-node reboot-node delete-node",
            "Changes": "scale delete-group update auto-patch node-recovery observability",
        }
    ),
    no_args_is_help=True,
)


@app.command()
def init(
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write it.")] = DEFAULT_FILE,
) -> None:
    """Write an example cluster file: one ml.c5.xlarge, one ml.trn1.32xlarge, 1.2 TiB at /fsx."""
    from hyperpod_ft.cluster import config as cluster_config

    copy_example(cluster_config.example(), output)
    print(f"Wrote {output}. Edit it, then: hyperpod-ft cluster validate {output}")


@app.command()
def plans(
    instance: Annotated[str, typer.Option("--instance", help="Instance type, such as trn2.48xlarge.")],
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many instances.")] = 1,
    days: Annotated[int, typer.Option("--days", min=1, help="For how long.")] = 7,
    start: Annotated[
        datetime | None,
        typer.Option("--from", metavar="YYYY-MM-DD", formats=["%Y-%m-%d"], help="First day. Default: today."),
    ] = None,
    training_jobs: Annotated[
        bool, typer.Option("--training-jobs", help="Plans for training jobs, not clusters.")
    ] = False,
    region: Annotated[str | None, typer.Option("--region", help="AWS region. Default: the AWS CLI's.")] = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """List the training plans that AWS offers, with their prices; buys nothing."""
    from hyperpod_ft.aws.session import Session
    from hyperpod_ft.cluster import plans as training_plans

    target = "training-job" if training_jobs else "hyperpod-cluster"
    session = Session(region, profile)
    found = training_plans.offers(session, instance, count, days, start, target)
    show_cluster.offers(found, str(session.client("sagemaker").meta.region_name), as_json)


@app.command()
def validate(
    file: File = DEFAULT_FILE,
    overrides: Overrides = None,
    offline: Annotated[bool, typer.Option("--offline", help="Check without an AWS account or network.")] = False,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Check a cluster file before money is spent; exit code 1 if there are errors."""
    from hyperpod_ft.aws.session import Session
    from hyperpod_ft.cluster import config as cluster_config
    from hyperpod_ft.cluster.validation import validate as validation

    try:
        config = cluster_config.load(file, overrides or ())
    except ConfigError as error:
        raise typer.Exit(show_cluster.problems(error.problems, as_json)) from None

    client = None if offline else Session(config.region, profile).client
    raise typer.Exit(tables.validated(validation.validate(config, client), as_json))


@app.command()
def create(
    file: File = DEFAULT_FILE,
    overrides: Overrides = None,
    profile: Profile = None,
    timeout: Timeout = 60.0,
    no_wait: NoWait = False,
) -> None:
    """Validate, deploy the stack, upload the lifecycle scripts, create the cluster, and wait until all nodes run.

    Safe to run again after an interruption: it continues from the existing resources.
    """
    from hyperpod_ft.cluster import config as cluster_config
    from hyperpod_ft.cluster import create as creation
    from hyperpod_ft.cluster.access import ClusterAccess

    config = cluster_config.load(file, overrides or ())
    reference = cluster_config.ClusterReference(config.name, config.region, config, str(file))
    access = ClusterAccess.of(reference, profile, tables.progress)
    with access.explained(), interruptible(CONTINUES):
        cluster = creation.create(access, config, None if no_wait else timeout)
    if cluster is None:
        print(f"Not waiting. Check it with: hyperpod-ft cluster status {file}")
    else:
        show_cluster.created(config, cluster, file)


@command(app)
def status(
    access: "ClusterAccess",
    nodes: Annotated[bool, typer.Option("--nodes", help="List every node with its state, instead of groups.")] = False,
    as_json: Json = False,
) -> None:
    """Show a cluster and its groups or nodes; exit code 1 if the cluster or a node has failed."""
    from hyperpod_ft.cluster import inspection

    raise typer.Exit(show_cluster.status(inspection.status(access), as_json, nodes=nodes))


@command(app)
def events(
    access: "ClusterAccess",
    group: Annotated[str | None, typer.Option("--group", help="Only events of this instance group.")] = None,
    node: Annotated[str | None, typer.Option("--node", help="Only events of this instance id or host name.")] = None,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many, the newest.")] = 50,
    as_json: Json = False,
) -> None:
    """List what HyperPod did to a cluster with continuous provisioning, and why something failed."""
    from hyperpod_ft.cluster import inspection

    found = inspection.newest_events(access, group, node, count)
    show_cluster.events(found, as_json)


@command(app, report=show_cluster.print_to_stderr)
def logs(
    access: "ClusterAccess",
    node: Annotated[
        str | None, typer.Option("--node", help="Instance id or host name. Default: the node that wrote last.")
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Wait for more lines.")] = False,
) -> None:
    """Print a node's lifecycle log from CloudWatch, also for nodes that no longer exist."""
    from hyperpod_ft.cluster import inspection

    for line in inspection.lifecycle_log(access, node, follow):
        print(line, flush=follow)


@command(app, "ssh")
def ssh_command(
    access: "ClusterAccess",
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND...]", help="Run this instead of a shell.")
    ] = None,
    group: Annotated[
        str | None,
        typer.Option("--group", help="First running node of this group. Default: the login group."),
    ] = None,
    node: Annotated[str | None, typer.Option("--node", help="This node: instance id or host name.")] = None,
    user: Annotated[
        str | None,
        typer.Option(
            "--user", "-l", help="User on the node. Default: the cluster's user with your key; without users, ubuntu."
        ),
    ] = None,
    identity: Annotated[Path | None, typer.Option("--identity", "-i", help="Key file, private or public.")] = None,
    forward: Annotated[
        list[str] | None, typer.Option("-L", metavar="PORT:HOST:PORT", help="Forward a port, as ssh does.")
    ] = None,
    ssm: Annotated[
        bool, typer.Option("--ssm", help="A shell through SSM, without sshd and keys, as SSM's own user.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the ssh command without running it.")] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Write and print the ssh configuration for other programs.")
    ] = False,
) -> None:
    """Log in to a node through SSM (docs/cluster-day-two.md)."""
    from hyperpod_ft.cluster import access as cluster_access
    from hyperpod_ft.cluster.ssh import connect as ssh
    from hyperpod_ft.cluster.ssh.connect import IMAGE_USER

    user = user or (IMAGE_USER if ssm else cluster_access.login_user(access, identity))
    request = ssh.SshRequest(user, group, node, identity, tuple(forward or ()), tuple(command or ()))
    route = cluster_access.ssh_route(access, request)
    if dry_run:
        print(ssh.preview(route, request))
    elif print_config:
        print(ssh.write_config(route, request), end="")
    else:
        raise typer.Exit(
            ssh.shell(route, show_cluster.print_to_stderr)
            if ssm
            else ssh.connect(route, request, show_cluster.print_to_stderr)
        )


@command(app)
def delete(
    access: "ClusterAccess",
    delete_data: Annotated[
        bool, typer.Option("--delete-data", help="Also the file system and the bucket, with their data.")
    ] = False,
    confirm: Confirm = None,
    timeout: Timeout = 60.0,
) -> None:
    """Delete the cluster and everything that costs money except the data; with --delete-data also the data.

    Prints the remaining resources that cost money. Safe to run again after an interruption.
    """
    from hyperpod_ft.cluster import maintenance

    what = "and /fsx and the bucket with all their data" if delete_data else "but not /fsx and the bucket"
    print(f"This deletes cluster {access.name}, {what}.")
    require_name(access.name, confirm)
    with interruptible(CONTINUES):
        left = maintenance.delete_cluster(access, delete_data=delete_data, timeout=timeout)
    show_cluster.remains(left, access.name, access.region)


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
    show_cluster.extension(extension.installed(access), as_json)


@command(app)
def doctor(access: "ClusterAccess", report: Report = None, as_json: Json = False) -> None:
    """Check a cluster from outside: its state, quotas, and with a cluster file all that `validate` checks."""
    from hyperpod_ft.cluster import doctor as checks

    tables.conclude(checks.cluster(access), report, as_json)


app.add_typer(maintain.app)
