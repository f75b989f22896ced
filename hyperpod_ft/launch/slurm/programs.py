"""Run Slurm's command-line programs, and explain their failures in one line."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hyperpod_ft.errors import UserError, last_line

TIMEOUT_SECONDS = 60
_NO_SLURM = (
    "run this on a Slurm head node, start a cluster here (`hyperpod-ft local up`), or submit with --launcher process"
)
# What Slurm's programs say where they are installed and no cluster is configured.
_NO_CONFIGURATION = "configuration source"
# The messages when slurmctld does not answer, whatever the request; any other message is a refusal.
# "Unexpected message received" is what scontrol requeue says while slurmctld restarts (seen with 22.05).
_NO_CONTROLLER = re.compile(r"contact|connect|timed out|answer|unexpected message", re.IGNORECASE)
START_CONTROLLER = "check that slurmctld is running"


class SlurmUnreachableError(UserError):
    """Slurm's controller does not answer; it may later."""


def run(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    directory: Path | None = None,
    seconds: float = TIMEOUT_SECONDS,
    inherits: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a program of Slurm's; one that `inherits` holds this process's locks that may be inherited until it ends.

    Raises UserError if it is not installed, SlurmUnreachableError if it takes too long.
    """
    try:
        return subprocess.run(
            arguments,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            close_fds=not inherits,
            check=False,
        )
    except FileNotFoundError as error:
        raise UserError(f"{arguments[0]}: not found on this machine", _NO_SLURM) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmUnreachableError(f"{arguments[0]}: no answer in {seconds:g} s", START_CONTROLLER) from error


def message_of(stderr: str) -> str:
    """The last line of a Slurm program's messages, without the program's name."""
    return re.sub(r"^\w+: (error|fatal): ", "", last_line(stderr)) or "gave no error message"


def is_unreachable(stderr: str) -> bool:
    """Whether these messages say that there is no cluster here, or that its controller does not answer."""
    return _NO_CONFIGURATION in stderr or bool(_NO_CONTROLLER.search(message_of(stderr)))


def failure(program: str, stderr: str, remedy: str) -> UserError:
    """A failed Slurm program's error; `remedy` is for a refusal."""
    message = message_of(stderr)
    if _NO_CONFIGURATION in stderr:
        return UserError(f"{program}: {message}", _NO_SLURM)
    if _NO_CONTROLLER.search(message):
        return SlurmUnreachableError(f"{program}: {message}", START_CONTROLLER)
    return UserError(f"{program}: {message}", remedy)


def without_defaults(environment: Mapping[str, str], kept: Sequence[str] = ()) -> dict[str, str]:
    """The environment without the variables that would change these programs' output or outrank their arguments."""
    return {
        name: value
        for name, value in environment.items()
        if name in kept or not name.startswith(("SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_"))
    }
