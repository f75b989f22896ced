"""The container of a run's stages on Slurm: options of NVIDIA's Pyxis, a plugin that adds them to srun. Pure."""

import re
from collections.abc import Iterable
from itertools import chain

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run_paths import RunPaths

# An image's own value of a variable outranks that of the job, unless it is named; the job scripts export these.
_VARIABLES = (
    *("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONNOUSERSITE", "PYTHONSAFEPATH", "OMP_NUM_THREADS"),
    *("TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TORCH_DEVICE_BACKEND_AUTOLOAD"),
)
# After what says more: how srun and Pyxis end, and what enroot prints as it goes.
_SAYS_NOTHING = re.compile(r"^srun: error: .*(: task \d|Exited with)|pyxis: child \d+ |printing enroot log|\[INFO\]")
_OF_ENROOT = re.compile(r"pyxis: {2,}(\S.*)")
_PREFIX = re.compile(r"^(slurmstepd\S*: |srun: )?(error: )?(pyxis: *)?(env: )?(\[ERROR\] )?")
_UNMOUNTABLE = re.compile(r"[\s:,]")  # Pyxis separates mounts with commas and colons, enroot with spaces


# Nothing of HOME, the user's own id, and no program of the image before ours.
CLOSED = ("--no-container-mount-home", "--no-container-remap-root", "--no-container-entrypoint")
# Where a container has a directory that nothing else has: Slurm's daemon may ignore the options that srun has taken.
ONLY_INSIDE = "/hyperpod-ft-container"
IGNORED = (
    "this node ignores srun's --container-image; load Pyxis in plugstack.conf of every node, and restart slurmd there"
)
# Runs another program in the container, and says so when it is in none.
CHECKED = ("/bin/sh", "-c", f"""test -e {ONLY_INSIDE} && exec "$@"; echo "error: {IGNORED}" >&2; exit 2""", "sh")


def registry_uri(image: str) -> str:
    """The image as enroot reads it in every version, digests from 4.0 on: with `#` after a registry."""
    registry, slash, name = image.partition("/")
    return f"docker://{registry}#{name}" if slash and ("." in registry or ":" in registry) else f"docker://{image}"


def drivers(config: RunConfig, *, devices: bool) -> dict[str, str]:
    """What enroot's hook for NVIDIA's drivers reads, whatever the image says; `devices`: whether the job uses any.

    Images name all devices or none. The hook fails on a node without the drivers, and without it there is no libcuda.
    """
    if devices and config.instance.device == "cuda":
        return {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    return {"NVIDIA_VISIBLE_DEVICES": "void"}


def mounts(config: RunConfig, job: str) -> str:
    """What a job sees at its own path, and the place that shows that it is inside; `job`: a stage's name, or another.

    Devices are not among them: enroot gives a container all of the node's `/dev`, unless ENROOT_RESTRICT_DEV is set.
    """
    found = dict.fromkeys([config.cluster.root, *config.env.container_mounts, *_local_files(config).get(job, ())])
    return ",".join([*(f"{path}:{path}" for path in found), f"{config.cluster.root}:{ONLY_INSIDE}"])


def check_mounts(config: RunConfig) -> None:
    """Raise UserError for a path that cannot be mounted."""
    for path in [config.cluster.root, *config.env.container_mounts, *chain(*_local_files(config).values())]:
        if bad := _UNMOUNTABLE.search(path):
            raise UserError(
                f"env.container: {path} contains {bad[0]!r}, which Pyxis cannot mount", "use a path without it"
            )


def options(config: RunConfig, paths: RunPaths, variables: Iterable[str] = ()) -> list[str]:
    """srun's options for a program in the container, except its mounts.

    The container is writable, since programs write below HOME; what they write there is lost. `variables`: names of
    those whose values here outrank the image's, besides those of every job.
    """
    names = dict.fromkeys([*_VARIABLES, *config.cluster.environment, *variables])
    return [
        f"--container-image={paths.image}",
        f"--container-workdir={paths.directory}",
        *CLOSED,
        "--container-writable",
        f"--container-env={','.join(names)}",
    ]


def checked(config: RunConfig, paths: RunPaths, job: str) -> list[str]:
    """srun's options and the program before another one."""
    return [*options(config, paths), f"--container-mounts={mounts(config, job)}", *CHECKED]


def telling(messages: str) -> str:
    """The line that says most of what a program in the container, enroot, Pyxis and srun have printed."""
    lines = [line.strip() for line in messages.splitlines() if line.strip() and not _SAYS_NOTHING.search(line)]
    of_enroot = [found[1] for line in lines if (found := _OF_ENROOT.search(line))]
    named = [line for line in lines if "error:" in line]
    of_pyxis = [line for line in named if "pyxis:" in line]
    said = [line for line in of_enroot if "[ERROR]" in line] or of_enroot[-1:] or of_pyxis or named[-1:] or lines[-1:]
    return _PREFIX.sub("", said[0]) if said else "no message"


def _local_files(config: RunConfig) -> dict[str, list[str]]:
    """What a stage reads in the container and not below the root, where stage download puts models and data."""
    own_tasks = config.eval.include_path if config.eval else None
    read = {
        "reward": [reward.file for reward in config.reward if reward.file],
        "tasks": [own_tasks] if own_tasks else [],
    }
    root = f"{config.cluster.root}/"
    return {
        stage: [path for path in paths if path.startswith("/") and not path.startswith(root)]
        for stage, paths in read.items()
    }
