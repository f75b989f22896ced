"""Run -> {stage: sbatch text}. `render` is a pure function: the same run and installation give the same bytes.

Values from the run file reach a shell only through `shlex.quote`, and `#SBATCH` lines only after `config` has
matched them against a strict pattern.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from hyperpod_ft import __version__
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.digests import text_sha256
from hyperpod_ft.launch import container
from hyperpod_ft.planning.engine_rules import rules_of
from hyperpod_ft.planning.plan import Resources, StagePlan
from hyperpod_ft.runs.job_files import JOB_ID, NODES, banner
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths
from hyperpod_ft.shipped import PACKAGE, shell_templates

# Stages that run with the kit's interpreter and use the network. The others work offline, with what these have fetched.
_WITH_NETWORK = ("env", "download", "tasks")
# For ranks that compute on CPUs. By default glibc takes blocks of more than 32 MB from the kernel whenever they are
# allocated, one page fault for every 4 KB, and returns what is free at the end of its heap; a training step would pay
# for that each time (mallopt(3)).
ALLOCATION_ON_CPUS = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(4 * 2**30))
# torch's allocator keeps a block for tensors of its size unless segments can grow; how much the loss needs differs from
# step to step with the labels. The second name is the older one.
_ALLOCATION_ON_GPUS = {"PYTORCH_ALLOC_CONF": "${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"}
_ALLOCATION = {"cpu": ALLOCATION_ON_CPUS, "cuda": _ALLOCATION_ON_GPUS}


@dataclass(frozen=True)
class Installation:
    """An interpreter with the kit's packages, and the directory of the `hyperpod_ft` package that jobs import."""

    python: Path
    code: Path

    @classmethod
    def here(cls) -> "Installation":
        """What this process runs."""
        return cls(Path(sys.executable), PACKAGE.parent)


def reads_secrets(run: Run, job: str) -> bool:
    """Whether a job uses the network, publishes to a tracker, or is of no stage: its script reads `paths.secrets`."""
    publishes = bool(run.config.tracking.trackers) and job in ("train", "generate")
    return job in _WITH_NETWORK or job not in run.plan or publishes


def render(run: Run, installation: Installation) -> dict[str, str]:
    """The text of every stage's script, by stage name, in the plan's order."""
    environment = shell_templates()
    return {stage.name: _script(environment, run, stage, installation) for stage in run.plan.stages}


def write(run: Run, directory: Path) -> list[Path]:
    """Write the scripts into a directory, to be read: they run the code of this installation."""
    directory.mkdir(parents=True, exist_ok=True)
    scripts = []
    for stage, text in render(run, Installation.here()).items():
        scripts.append(directory / f"{stage}.sbatch")
        scripts[-1].write_text(text, encoding="utf-8")
    return scripts


def render_extra(
    run: Run, installation: Installation, job: str, resources: Resources, template: str, **values: object
) -> str:
    """The script of a job that belongs to no stage, from a template that extends base.sbatch.j2, and its `values`."""
    context = _context(run, job, resources, installation, with_network=False, starts_ranks=False)
    return shell_templates().get_template(template).render(context, **values)


def _script(environment: jinja2.Environment, run: Run, stage: StagePlan, installation: Installation) -> str:
    template = environment.get_template(f"sbatch/{stage.name if stage.starts_ranks else 'base'}.sbatch.j2")
    with_network = stage.name in _WITH_NETWORK
    return template.render(_context(run, stage.name, stage.resources, installation, with_network, stage.starts_ranks))


def _context(
    run: Run, job: str, resources: Resources, installation: Installation, with_network: bool, starts_ranks: bool
) -> dict[str, Any]:
    """What the templates read. `job` is a stage's name, or that of a job outside the stages."""
    # stage env starts srun itself, for what it does in the container
    contained = run.config.env.container is not None and job not in ("env", "download")
    if with_network and not (contained and job == "tasks"):
        python, remedy = installation.python, "install hyperpod-ft on the shared volume"
    elif job == "eval":
        python, remedy = run.paths.evaluation_python, "run the tasks stage, or correct eval.python"
    else:
        python, remedy = run.paths.python, "run the env stage, or correct env.python"
    fewest = run.config.cluster.min_nodes if job == "train" else None
    allocation = _ALLOCATION.get(run.config.instance.device, {})
    cache = run.paths.neuron_cache if "precompile" in run.plan else None
    of_engine = rules_of(run.config.engine).variables(run.config, cache)
    # stage env too passes them on
    drivers = container.drivers(run.config, devices=resources.exclusive) if run.config.env.container else {}
    return {
        "stage": job,
        "banner": banner(job, f"${JOB_ID}"),
        "name": run.config.name,
        "engine": run.config.engine,
        "reads_secrets": reads_secrets(run, job),
        "with_secrets": [name for name in run.plan.needing(job) if reads_secrets(run, name)],
        "job_comment": slurm_job_comment(run.paths),
        "run_dir": run.paths.directory,
        "job_name": slurm_job_name(run.config, job),
        "output": _quote_option(run.paths.logs / "%x_%j.out"),
        "resources": resources,
        "min_nodes": fewest,
        "nodes_variable": NODES,
        "step_nodes": f'"${NODES}"' if fewest else resources.nodes,
        "cluster": run.config.cluster.model_dump(),
        "starts_ranks": starts_ranks,
        "instance": run.config.instance,
        "threads": 1 if starts_ranks else resources.cpus or 8,
        "offline": not with_network,
        "python": python,
        "interpreter_remedy": remedy,
        "kit": installation.python,
        "container": container.options(run.config, run.paths, [*allocation, *of_engine, *drivers]) if contained else (),
        "drivers": drivers,
        "checked": container.CHECKED,
        "mounts": container.mounts(run.config, job),
        "publishes": contained and job == "generate" and bool(run.config.tracking.trackers),
        "code": installation.code,
        "allocation": allocation,
        "of_engine": of_engine,
        "version": __version__,
    }


def _quote_option(path: Path) -> str:
    # sbatch reads double quotes on #SBATCH lines; config allows no character that it would read inside them
    return f'"{path}"' if " " in str(path) else str(path)


JOB_COMMENT = "hyperpod-ft:"  # how the comment of every job of this kit begins


def slurm_job_name(config: RunConfig, stage: str) -> str:
    return f"{config.name}-{stage}"


def slurm_job_comment(paths: RunPaths) -> str:
    """Names this run directory in Slurm: two runs of one recipe below two roots are two runs.

    A digest, since Slurm's listings leave no path with spaces whole. `root` was made absolute when the run file
    was loaded.
    """
    return f"{JOB_COMMENT}{paths.directory.name}@{text_sha256(str(paths.directory))[:12]}"
