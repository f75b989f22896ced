"""`hyperpod-ft cluster`: each command parses, calls one function and prints. boto3 is imported late."""

from pathlib import Path
from typing import Annotated

import typer

from hyperpod_ft.cli.cluster import maintain, observe
from hyperpod_ft.cli.cluster.arguments import (
    DEFAULT_FILE,
    File,
    Legacy,
    NoWait,
    Overrides,
    Reference,
    Region,
    Timeout,
    access_of,
    find,
    interruptible,
    load,
    reference_of,
)
from hyperpod_ft.cli.confirmation import typed
from hyperpod_ft.cli.example_file import copy_example
from hyperpod_ft.cli.options import Json, Profile
from hyperpod_ft.cli.output import show_cluster
from hyperpod_ft.errors import ConfigError, UserError

app = typer.Typer(
    name="cluster",
    help="Create, validate, connect to, change and delete a HyperPod cluster.",
    no_args_is_help=True,
)


@app.command()
def init(
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write it.")] = DEFAULT_FILE,
) -> None:
    """Write an example cluster file: one ml.c5.xlarge, one ml.trn1.32xlarge, 1.2 TiB at /fsx."""
    from hyperpod_ft.config import cluster_config

    copy_example(cluster_config.example(), output)
    print(f"Wrote {output}. Edit it, then: hyperpod-ft cluster validate {output}")


@app.command()
def validate(
    file: File = DEFAULT_FILE,
    overrides: Overrides = None,
    legacy: Legacy = False,
    offline: Annotated[bool, typer.Option("--offline", help="Check without an AWS account or network.")] = False,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Check a cluster file before money is spent; exit code 1 if there are errors."""
    try:
        config = load(file, overrides, legacy)
    except ConfigError as error:
        raise typer.Exit(show_cluster.problems(error.problems, as_json)) from None
    from hyperpod_ft.aws.session import Session
    from hyperpod_ft.aws.validation import validate as validation

    if offline:
        checked = validation.validate_offline(config)
    else:
        checked = validation.validate(config, Session(config.region, profile).client)
    raise typer.Exit(show_cluster.validated(checked, as_json))


@app.command()
def create(
    file: File = DEFAULT_FILE,
    overrides: Overrides = None,
    legacy: Legacy = False,
    profile: Profile = None,
    timeout: Timeout = 60.0,
    no_wait: NoWait = False,
) -> None:
    """Validate, deploy the stack, upload the lifecycle scripts, create the cluster, and wait until all nodes run.

    Safe to run again after an interruption: it continues from the existing resources.
    """
    from hyperpod_ft.aws.cluster import create as creation

    config = load(file, overrides, legacy)
    access = access_of(reference_of(config, file), profile)
    with interruptible():
        cluster = creation.create(access, config, None if no_wait else timeout)
    if cluster is None:
        print(f"Not waiting. Check it with: hyperpod-ft cluster status {file}")
    else:
        show_cluster.created(config, cluster, file)


@app.command()
def status(
    cluster: Reference = str(DEFAULT_FILE), region: Region = None, profile: Profile = None, as_json: Json = False
) -> None:
    """Show a cluster and its groups; exit code 1 if the cluster or a node has failed."""
    from hyperpod_ft.aws.cluster import inspection

    raise typer.Exit(show_cluster.status(inspection.status(access_of(find(cluster, region), profile)), as_json))


@app.command()
def nodes(
    cluster: Reference = str(DEFAULT_FILE), region: Region = None, profile: Profile = None, as_json: Json = False
) -> None:
    """List every node with its state."""
    from hyperpod_ft.aws.cluster import inspection

    show_cluster.nodes(inspection.nodes(access_of(find(cluster, region), profile)), as_json)


@app.command()
def events(
    cluster: Reference = str(DEFAULT_FILE),
    group: Annotated[str | None, typer.Option("--group", help="Only events of this instance group.")] = None,
    node: Annotated[str | None, typer.Option("--node", help="Only events of this instance id or host name.")] = None,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many, the newest.")] = 50,
    region: Region = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """List what HyperPod did to a cluster with continuous provisioning, and why something failed."""
    from hyperpod_ft.aws.cluster import inspection

    found = inspection.newest_events(access_of(find(cluster, region), profile), group, node, count)
    show_cluster.events(found, as_json)


@app.command()
def logs(
    cluster: Reference = str(DEFAULT_FILE),
    node: Annotated[
        str | None, typer.Option("--node", help="Instance id or host name. Default: the node that wrote last.")
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Wait for more lines.")] = False,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Print a node's lifecycle log from CloudWatch, also for nodes that no longer exist."""
    from hyperpod_ft.aws.cluster import inspection

    access = access_of(find(cluster, region), profile, show_cluster.print_to_stderr)
    for line in inspection.lifecycle_log(access, node, follow):
        print(line, flush=follow)


@app.command("ssh")
def ssh_command(
    cluster: Reference = str(DEFAULT_FILE),
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND...]", help="Run this instead of a shell.")
    ] = None,
    group: Annotated[
        str | None,
        typer.Option("--group", help="Connect to the first running node of this group. Default: the login group."),
    ] = None,
    node: Annotated[str | None, typer.Option("--node", help="Connect to this node: instance id or host name.")] = None,
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
        bool, typer.Option("--ssm", help="Open a shell through SSM, without sshd and keys, as SSM's own user.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the ssh command without running it.")] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Write the ssh configuration for other programs and print it.")
    ] = False,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Log in to a node through SSM (docs/reaching-nodes.md)."""
    from hyperpod_ft.aws.cluster import login
    from hyperpod_ft.aws.ssh import connect as ssh
    from hyperpod_ft.aws.ssh.choice import IMAGE_USER

    access = access_of(find(cluster, region), profile)
    user = user or (IMAGE_USER if ssm else login.login_user(access, identity))
    request = ssh.SshRequest(user, group, node, identity, tuple(forward or ()), tuple(command or ()))
    route = login.ssh_route(access, request)
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


@app.command()
def delete(
    cluster: Reference = str(DEFAULT_FILE),
    delete_data: Annotated[
        bool, typer.Option("--delete-data", help="Also delete the file system and the bucket with all their data.")
    ] = False,
    confirm: Annotated[
        str | None, typer.Option("--confirm", metavar="NAME", help="The cluster's name, instead of typing it.")
    ] = None,
    region: Region = None,
    profile: Profile = None,
    timeout: Timeout = 60.0,
) -> None:
    """Delete the cluster and everything that costs money except the data; with --delete-data also the data.

    Prints the remaining resources that cost money. Safe to run again after an interruption.
    """
    from hyperpod_ft.aws.cluster import delete as deletion

    target = find(cluster, region)
    what = "and /fsx and the bucket with all their data" if delete_data else "but not /fsx and the bucket"
    print(f"This deletes cluster {target.name}, {what}.")
    if typed(target.name, confirm) != target.name:
        raise UserError(f"not deleted: the name is {target.name}", f"type it, or pass --confirm {target.name}")
    access = access_of(target, profile)
    with interruptible():
        left = deletion.delete(access, delete_data=delete_data, timeout=timeout)
    show_cluster.remains(left, target.name, access.region)


app.add_typer(maintain.app)
app.add_typer(observe.app)
