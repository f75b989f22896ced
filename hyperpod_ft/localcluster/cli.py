"""`hyperpod-ft local`: a real Slurm on this machine, to rehearse runs."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyperpod_ft.cli.options import command_group

if TYPE_CHECKING:
    from hyperpod_ft.localcluster import LocalCluster

app = typer.Typer(
    name="local",
    cls=command_group(),
    help="Start and stop a real Slurm on this machine, to rehearse runs.",
    no_args_is_help=True,
)

Directory = Annotated[
    Path | None,
    typer.Option(
        help="Directory of the cluster's logs and lock, one for each cluster. "
        "Default: $HYPERPOD_FT_LOCAL or ~/.local/state/hyperpod-ft/local.",
        show_default=False,
    ),
]
Node = Annotated[str, typer.Argument(help="A node's name, from `local status`.", show_default=False)]


@app.command()
def up(
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 2,
    cpus: Annotated[int, typer.Option(help="CPUs each node claims to have; may exceed the machine's.")] = 4,
    memory_mb: Annotated[
        int | None,
        typer.Option(help="MiB each node claims to have. Default: the machine's.", show_default=False),
    ] = None,
    die_with: Annotated[
        int | None,
        typer.Option(
            metavar="PID",
            help="Stop when this process ends; in a script: --die-with $$.",
            show_default=False,
        ),
    ] = None,
    directory: Directory = None,
) -> None:
    """Start the cluster and wait until its nodes are idle."""
    cluster = _cluster(directory)
    started = cluster.up(nodes=nodes, cpus=cpus, memory_mb=memory_mb, bound_to=die_with)
    typer.echo("up" if started else "already up")
    typer.echo('use it with: eval "$(hyperpod-ft local env)"')


@app.command()
def status(directory: Directory = None) -> None:
    """Show whether the cluster is up, and the state of its nodes."""
    now = _cluster(directory).status()
    if not now.running:
        typer.echo(f"down  {now.directory}")
        return
    typer.echo(f"up  Slurm {now.slurm_version}  pid {now.pid}  ports {now.ports[0]}-{now.ports[-1]}  {now.directory}")
    for node in now.nodes:
        typer.echo(f"{node.name}  {node.state}")


@app.command()
def down(directory: Directory = None) -> None:
    """Stop the cluster; its jobs are killed and forgotten."""
    typer.echo("down" if _cluster(directory).down() else "already down")


@app.command("kill-node")
def kill_node(node: Node, directory: Directory = None) -> None:
    """Cut a node's power: every process on it is killed at once."""
    _cluster(directory).kill_node(node)
    typer.echo(f"{node} is off")


@app.command("start-node")
def start_node(node: Node, directory: Directory = None) -> None:
    """Start a node again and wait until it accepts jobs."""
    _cluster(directory).start_node(node)
    typer.echo(f"{node} is on")


@app.command()
def env(directory: Directory = None) -> None:
    """Print shell commands that make Slurm's clients use this cluster: eval "$(hyperpod-ft local env)"."""
    cluster = _cluster(directory)
    cluster.require_running()
    for name, value in cluster.environment().items():
        typer.echo(f"export {name}={shlex.quote(value)}")


def _cluster(directory: Path | None) -> "LocalCluster":
    from hyperpod_ft.localcluster import LocalCluster, default_directory

    return LocalCluster(directory or default_directory())
