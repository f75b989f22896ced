"""`hyperpod-ft cluster`: each command parses, calls one function and prints. What imports boto3 is imported late."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyperpod_ft.aws.cluster_reference import ClusterReference, find
from hyperpod_ft.cli import show_cluster
from hyperpod_ft.config import cluster_config as cluster_file
from hyperpod_ft.config.cluster_config import ClusterConfig
from hyperpod_ft.errors import ConfigError, UserError

if TYPE_CHECKING:
    from hyperpod_ft.aws.commands import Commands

app = typer.Typer(
    name="cluster",
    help="A HyperPod cluster: create it, prove it, reach it, remove it.",
    no_args_is_help=True,
)

DEFAULT_FILE = Path("cluster.yaml")
File = Annotated[Path, typer.Argument(metavar="[CLUSTER_FILE]", help="A cluster file.")]
Reference = Annotated[
    str, typer.Argument(metavar="[CLUSTER]", help="A cluster file, or a cluster's name (see --region).")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. node_recovery=None.")
]
Legacy = Annotated[bool, typer.Option("--legacy-provisioning", help="The same as `--set provisioning=legacy`.")]
Region = Annotated[str | None, typer.Option("--region", help="Region of a name; as the AWS CLI's when left out.")]
Profile = Annotated[str | None, typer.Option("--profile", help="Profile of the AWS configuration.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="MINUTES", help="How long to wait.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Ask HyperPod, and do not wait.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@app.command()
def init(
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write it.")] = DEFAULT_FILE,
) -> None:
    """Write a cluster file to edit: one ml.c5.xlarge, one ml.trn1.32xlarge, 1.2 TiB at /fsx."""
    try:
        with output.open("x", encoding="utf-8") as stream:
            stream.write(cluster_file.example().read_text(encoding="utf-8"))
    except FileExistsError:
        raise UserError(f"{output} exists", "give another name with -o") from None
    print(f"Wrote {output}. Edit it, then: hyperpod-ft cluster validate {output}")


@app.command()
def validate(
    file: File = DEFAULT_FILE,
    overrides: Overrides = None,
    legacy: Legacy = False,
    offline: Annotated[bool, typer.Option("--offline", help="Ask AWS nothing.")] = False,
    cluster_config: Annotated[
        Path | None,
        typer.Option(metavar="JSON", help="Instead: a CreateCluster request written by hand; asks AWS nothing."),
    ] = None,
    provisioning_parameters: Annotated[
        Path | None, typer.Option(metavar="JSON", help="And the provisioning_parameters.json that goes with it.")
    ] = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Check everything that can be before money is spent; exit code 1 when anything is an error."""
    if provisioning_parameters is not None and cluster_config is None:
        raise UserError("--provisioning-parameters: goes with --cluster-config", "give both")
    if cluster_config is not None:
        from hyperpod_ft.aws.validation.handwritten import validate_handwritten  # noqa: PLC0415

        raise typer.Exit(show_cluster.findings(validate_handwritten(cluster_config, provisioning_parameters), as_json))
    try:
        config = _load(file, overrides, legacy)
    except ConfigError as error:
        raise typer.Exit(show_cluster.problems(error.problems, as_json)) from None
    from hyperpod_ft.aws.validation.validate import validate_offline  # noqa: PLC0415

    target = ClusterReference(config.name, config.region, config, str(file))
    checked = validate_offline(config) if offline else _commands(target, profile).validate(config)
    raise typer.Exit(show_cluster.validated(checked, as_json))


@app.command()
def create(
    file: File = DEFAULT_FILE,
    overrides: Overrides = None,
    legacy: Legacy = False,
    profile: Profile = None,
    render: Annotated[
        Path | None,
        typer.Option("--render", metavar="DIR", help="Write files for the AWS CLI instead, and ask AWS nothing."),
    ] = None,
    timeout: Timeout = 60.0,
    no_wait: NoWait = False,
) -> None:
    """Validate, make the stack, upload the lifecycle scripts, create the cluster, and wait until all nodes run.

    It can be run again after any interruption, and goes on from what is there.
    """
    config = _load(file, overrides, legacy)
    if render is not None:
        from hyperpod_ft.aws import aws_cli_files  # noqa: PLC0415

        print(f"{len(aws_cli_files.write(config, render))} files in {render}. Next: {render / 'create.sh'}")
        return
    commands = _commands(ClusterReference(config.name, config.region, config, str(file)), profile)
    with _interruptible():
        cluster = commands.create(config, None if no_wait else timeout)
    if cluster is None:
        print(f"Not waiting. Look at it: hyperpod-ft cluster status {file}")
    else:
        show_cluster.created(config, cluster, file)


@app.command()
def status(
    cluster: Reference = str(DEFAULT_FILE), region: Region = None, profile: Profile = None, as_json: Json = False
) -> None:
    """Show a cluster and its groups; exit code 1 when it, or a node of it, has failed."""
    found, nodes = _commands(find(cluster, region), profile).look()
    raise typer.Exit(show_cluster.status(found, nodes, as_json))


@app.command()
def nodes(
    cluster: Reference = str(DEFAULT_FILE), region: Region = None, profile: Profile = None, as_json: Json = False
) -> None:
    """List every node with its state."""
    _, found = _commands(find(cluster, region), profile).look()
    show_cluster.nodes(found, as_json)


@app.command()
def scale(
    cluster: Reference,
    group: Annotated[str, typer.Argument(help="An instance group.")],
    count: Annotated[int, typer.Argument(min=0, help="How many instances it is to have.")],
    region: Region = None,
    profile: Profile = None,
    timeout: Timeout = 60.0,
    no_wait: NoWait = False,
    yes: Yes = False,
) -> None:
    """Have an instance group hold more or fewer instances."""
    commands = _commands(find(cluster, region), profile)
    fewer = commands.fewer(group, count)
    if fewer and not yes:
        _confirm(f"{group}: HyperPod chooses {fewer} of its instances and ends them, with what runs there. Go on?")
    with _interruptible():
        commands.scale(group, count, None if no_wait else timeout)


@app.command("replace-node")
def replace_node(
    cluster: Reference,
    node: Annotated[list[str], typer.Argument(help="Instance ids or host names.")],
    region: Region = None,
    profile: Profile = None,
    timeout: Timeout = 60.0,
    no_wait: NoWait = False,
    yes: Yes = False,
) -> None:
    """Have HyperPod replace nodes by new instances. What they hold is lost but for the shared volume."""
    commands = _commands(find(cluster, region), profile)
    chosen = commands.pick(node)
    if not yes:
        names = ", ".join(f"{one.group} {one.instance_id}" for one in chosen)
        _confirm(f"Replace {names}? Jobs on it are killed, its own disks are lost; the shared volume stays.")
    with _interruptible():
        commands.replace(chosen, None if no_wait else timeout)


@app.command()
def logs(
    cluster: Reference = str(DEFAULT_FILE),
    node: Annotated[
        str | None, typer.Option("--node", help="Instance id or host name; the node that wrote last when left out.")
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on printing.")] = False,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Print what a node's lifecycle scripts wrote, from CloudWatch; also of nodes that are gone."""
    for line in _commands(find(cluster, region), profile, show_cluster.tell).lifecycle_log(node, follow):
        print(line, flush=follow)


@app.command("ssh")
def ssh_command(
    cluster: Reference = str(DEFAULT_FILE),
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND...]", help="Run this instead of a shell.")
    ] = None,
    group: Annotated[str | None, typer.Option("--group", help="Its first running node; else the login group.")] = None,
    node: Annotated[str | None, typer.Option("--node", help="This node: instance id or host name.")] = None,
    user: Annotated[str, typer.Option("--user", "-l", help="As whom.")] = "ubuntu",
    identity: Annotated[Path | None, typer.Option("--identity", "-i", help="Key file, private or public.")] = None,
    forward: Annotated[
        list[str] | None, typer.Option("-L", metavar="PORT:HOST:PORT", help="Forward a port, as ssh does.")
    ] = None,
    ssm: Annotated[bool, typer.Option("--ssm", help="A shell without sshd and keys, as SSM's own user.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the ssh command, and do nothing.")] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Write and print the ssh configuration, for other programs.")
    ] = False,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Log in to a node, through SSM: docs/reaching-nodes.md."""
    from hyperpod_ft.aws.ssh import connect as ssh  # noqa: PLC0415

    request = ssh.SshRequest(user, group, node, identity, tuple(forward or ()), tuple(command or ()))
    route = _commands(find(cluster, region), profile).ssh_route(request)
    if dry_run:
        print(ssh.preview(route, request))
    elif print_config:
        print(ssh.write_config(route, request), end="")
    else:
        raise typer.Exit(ssh.shell(route, show_cluster.tell) if ssm else ssh.connect(route, request, show_cluster.tell))


@app.command()
def delete(
    cluster: Reference = str(DEFAULT_FILE),
    delete_data: Annotated[
        bool, typer.Option("--delete-data", help="Delete the file system and the bucket too, with all they hold.")
    ] = False,
    confirm: Annotated[
        str | None, typer.Option("--confirm", metavar="NAME", help="The cluster's name, instead of typing it.")
    ] = None,
    region: Region = None,
    profile: Profile = None,
    timeout: Timeout = 60.0,
) -> None:
    """Delete the cluster, then what costs money but the data; the data as well with --delete-data.

    Says at the end what is left and costs money. It can be run again after any interruption.
    """
    target = find(cluster, region)
    what = "and /fsx and the bucket with all they hold" if delete_data else "but not /fsx and the bucket"
    print(f"This deletes cluster {target.name}, {what}.")
    if _typed(target.name, confirm) != target.name:
        raise UserError(f"not deleted: the name is {target.name}", "type it, or give it with --confirm")
    commands = _commands(target, profile)
    with _interruptible():
        left = commands.delete(delete_data, timeout)
    show_cluster.remains(left, target.name, commands.region)


def _load(file: Path, overrides: list[str] | None, legacy: bool) -> ClusterConfig:
    return cluster_file.load(file, (*(overrides or ()), *(("provisioning=legacy",) if legacy else ())))


def _commands(
    target: ClusterReference, profile: str | None, say: Callable[[str], None] = show_cluster.say
) -> "Commands":
    from hyperpod_ft.aws.commands import Commands  # noqa: PLC0415 - keeps --help quick

    return Commands.of(target, profile, say)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the command, not what AWS was asked for."""
    try:
        yield
    except KeyboardInterrupt:
        show_cluster.tell(
            "interrupted: AWS goes on, and what it made costs money; the same command goes on with it,"
            " `hyperpod-ft cluster delete` ends it"
        )
        raise


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise UserError(f"{question} Nobody is there to answer", "--yes says so")
    if not typer.confirm(question):
        raise typer.Exit(1)


def _typed(name: str, confirm: str | None) -> str:
    if confirm is not None:
        return confirm
    if not sys.stdin.isatty():
        raise UserError(f"deleting {name} needs its name typed, and nobody is there", f"--confirm {name}")
    answer: str = typer.prompt("Type its name to go on")
    return answer
