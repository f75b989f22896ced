"""Stage `env`: the Python environment of the stages that need torch.

    python -m hyperpod_ft.stages.env RUN_DIR

Runs with the kit's own interpreter. With `env.python` it checks that interpreter; otherwise it builds a virtual
environment below `cluster.root` from the engine's pins. Host packages and drivers are never touched. With
`env.container` it fetches the image, and does both in the container. In a training job's container it checks the
interpreter that the container has prepared.
"""

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from hyperpod_ft.environments.images import fetch
from hyperpod_ft.environments.installation import build, build_inside
from hyperpod_ft.environments.interpreters import check_torch, probe
from hyperpod_ft.errors import UserError
from hyperpod_ft.job.node_report import UNKNOWN_FORMAT, neuron_devices, neuron_ls
from hyperpod_ft.launch import container, torch_neuron
from hyperpod_ft.launch.slurm.client import step
from hyperpod_ft.planning.engine_rules import rules_of
from hyperpod_ft.planning.pins import environment_kind, pins_file
from hyperpod_ft.processes import signal_all, tree
from hyperpod_ft.runs.job_files import PYTHON
from hyperpod_ft.runs.jobs import job_python
from hyperpod_ft.runs.records import image_state
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import stage

# How much longer than the stage itself the job may take for trackers: training waits for it.
_TRACKERS_SECONDS = 120

# Imported by the kit's own code in the jobs.
_KIT = ("pydantic", "yaml", "numpy", "xxhash", "threadpoolctl", "tiktoken", "transformers", "peft", "safetensors")


def work(run: Run) -> stage.Result:
    config, rules, outputs = run.config, rules_of(run.config.engine), list[Path]()
    inside: list[str] = []
    of_image: dict[str, Any] = {}
    if config.env.container and (image := run.paths.image):
        inside = step(container.checked(config, run.paths, "env"))
        if not config.env.container.startswith("/"):
            fetch(config.env.container, image)
            outputs.append(image)
        of_image = {"container": config.env.container, "image": image_state(image)}
    if config.env.python is None and PYTHON not in os.environ:
        pins = pins_file(rules.environment_name(config))
        if inside:
            build_inside(inside, pins, run.paths.environment_path)
        else:
            if problem := torch_neuron.problem_here(config):
                raise UserError(f"env: {problem}", torch_neuron.REMEDY)
            build(pins, run.paths.environment_path, environment_kind(pins.stem), config.env.package_repositories)
        outputs.append(run.paths.environment_path / "pyvenv.cfg")
    python = job_python(run.paths)
    found = probe(python, (*_KIT, *rules.imports(config)), rules.packages_remedy(config), inside)
    print(f"env: {python}, Python {found['python']}, {len(found['packages'])} packages", flush=True)
    if config.engine == "torch":
        chosen = config.parallelism
        shards = chosen.sharding not in ("replicated", "zero1") and config.instance.has_accelerators
        neuron = "torch_neuronx" in rules.imports(config)
        check_torch(python, found, config.env, neuron=neuron, sharded_experts=chosen.expert_parallel > 1 and shards)
    facts: dict[str, Any] = {"interpreter": str(python), **found, **of_image}
    if config.instance.is_neuron:
        if found["cuda"]:  # only with env.python: an environment built here has a CPU build
            print(f"env: note: its torch is a CUDA {found['cuda']} build, which Neuron nodes cannot use", flush=True)
        facts["neuron_devices"] = _neuron_devices()
    return stage.Result(outputs, facts)


def _neuron_devices() -> list[dict[str, Any]] | None:
    """The devices, for the record; None without a `neuron-ls` that lists them, as on most head nodes."""
    program = neuron_ls()
    if program is None:
        print(f"env: no neuron-ls on {platform.node()}; the health check before training reads the devices", flush=True)
        return None
    found = neuron_devices(program)
    if found is None:
        print(f"env: note: {program} {UNKNOWN_FORMAT}", flush=True)
        return None
    print(f"env: {program} sees {len(found)} Neuron devices on {platform.node()}", flush=True)
    return found


def main() -> None:
    """Run the stage from the command line. Meanwhile a process installs what the run's trackers lack."""
    if PYTHON in os.environ or len(sys.argv) != 2:
        stage.main("env", work)
        return
    installer = subprocess.Popen([sys.executable, "-m", "hyperpod_ft.environments.trackers", sys.argv[1]])
    try:
        stage.main("env", work)
        installer.wait(_TRACKERS_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"env: trackers are not installed within {_TRACKERS_SECONDS} s; the run continues without", flush=True)
    finally:
        if installer.poll() is None:
            signal_all(tree(installer.pid), signal.SIGKILL)
        installer.wait()


if __name__ == "__main__":
    main()
