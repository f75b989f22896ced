"""Asks Slurm's controller, through SSM, what HyperPod does not know, and backs up what patching wipes there."""

from pathlib import Path

from hyperpod_ft.aws.ssh import ssm
from hyperpod_ft.errors import UserError

_BACKUP_SECONDS = 1200  # the dump of a large database takes minutes; SSM ends idle sessions after 20 (its default)
_STATES, _BACKUP = "hyperpod-ft-nodes:", "hyperpod-ft-backup:"


def node_states(aws_cli: ssm.AwsCli, target: str) -> dict[str, str]:
    """Slurm's state of every node by host name: idle, allocated, down, ... Raises UserError.

    Without the flags that sinfo appends, such as the `*` of a node that does not respond.
    """
    output = ssm.run(aws_cli, target, ssm.script_command(_script("node_states.sh")), _STATES)
    if output.startswith("failed:"):
        raise UserError(
            f"Slurm on the controller does not answer: {output.removeprefix('failed:').strip()}",
            "log in to the controller and check slurmctld",
        )
    states = (word.partition("=") for word in output.split())
    return {name: state.rstrip("*~#!%$@^-+") for name, _, state in states}


def back_up(aws_cli: ssm.AwsCli, target: str, mount_path: str) -> str:
    """Copy Slurm's state and accounting database to the shared volume; returns what was copied. Raises UserError."""
    command = ssm.script_command(_script("back_up_slurm.sh"), mount_path)
    output = ssm.run(aws_cli, target, command, _BACKUP, attempts=1, seconds=_BACKUP_SECONDS)
    if output.startswith("failed:"):
        raise UserError(
            f"the controller could not be backed up: {output.removeprefix('failed:').strip()}",
            "log in with `hyperpod-ft cluster ssh --ssm`, and check slurmctld and the shared volume",
        )
    return output


def _script(name: str) -> Path:
    return Path(__file__).with_name(name)
