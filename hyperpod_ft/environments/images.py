"""Images of containers on Slurm, fetched once for all jobs."""

import subprocess
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch import container
from hyperpod_ft.launch.slurm.client import step


def fetch(image: str, file: Path) -> None:
    """Have Pyxis save an image of a registry as a squashfs file, unless it is there: jobs then need no registry.

    Raises UserError with what Pyxis says.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with publish.lock(file.with_suffix(".lock"), f"env: another run is fetching {image}; waiting for it"):
        if file.exists():
            return
        print(f"env: fetching {image} into {file}; this takes minutes", flush=True)
        partial = publish.partial_of(file)
        publish.remove(partial)
        options = [f"--container-image={container.registry_uri(image)}", f"--container-save={partial}"]
        done = subprocess.run(step([*options, "true"]), capture_output=True, text=True, check=False)
        if done.returncode or not partial.exists():
            publish.remove(partial)
            raise failure(f"cannot fetch {image}", done.stderr)
        publish.fsync(partial)
        partial.rename(file)


def failure(what: str, messages: str) -> UserError:
    """What srun, Pyxis and a program in the container have printed, as an error of one line."""
    return UserError(f"env.container: {what}: {container.telling(messages)}", "see docs/install.md#containers")
