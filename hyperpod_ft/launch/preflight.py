"""Checks before any job is submitted: what a submission would do, and what it refuses."""

import contextlib
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyperpod_ft.config import engine_choice
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sources import kind_of
from hyperpod_ft.data import source_files
from hyperpod_ft.data.text.prompts import check_prompt
from hyperpod_ft.digests import names_below
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch import container, torch_neuron
from hyperpod_ft.launch.decision import decide
from hyperpod_ft.launch.interface import JobPreview
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.slurm.launcher import slurm_of
from hyperpod_ft.launch.slurm.programs import SlurmUnreachableError
from hyperpod_ft.launch.slurm.site import HYPERPOD, PYXIS, SlurmSite, pyxis_problem
from hyperpod_ft.launch.trainability import check_trainable
from hyperpod_ft.planning.certificate import Certificate
from hyperpod_ft.planning.engine_rules import rules_of
from hyperpod_ft.planning.memory import available
from hyperpod_ft.planning.model_fit import TrainingFit, check_all_nodes
from hyperpod_ft.planning.pins import PYTHON_VERSIONS, environment_kind
from hyperpod_ft.planning.plan import StagePlan
from hyperpod_ft.runs.assets import config_directory, teacher_here
from hyperpod_ft.runs.results.training_summary import Steps, steps
from hyperpod_ft.runs.run import Run


@dataclass(frozen=True)
class StagePreview:
    """A stage, whether it will run, and why it is not done; `reason` is empty when it is."""

    plan: StagePlan
    runs: bool
    reason: str


@dataclass(frozen=True)
class Preview:
    """A run's plan with what only this volume shows: which stages are done, the steps, the memory a rank needs."""

    run: Run
    stages: tuple[StagePreview, ...]
    fit: TrainingFit | None  # None: unknown until the model is downloaded
    certificate: Certificate | None  # None: unknown until stage certify, or with engine neuron
    available_bytes: float  # on each rank
    steps: Steps | None  # None: unknown until the dataset is prepared
    rows_per_step: int
    tokens_per_step: int  # at most
    refused: str  # why `submit` does not train this run again unasked; mostly empty
    other_jobs: tuple[JobPreview, ...]  # of launchers that the run file has a section for

    def as_dict(self) -> dict[str, Any]:
        values = self.run.plan.as_dict()
        for stage, known in zip(values["stages"], self.stages, strict=True):
            stage |= {"runs": known.runs, "reason": known.reason}
        estimated = self.fit.memory if self.fit else None
        memory = {"available_bytes": self.available_bytes, "bytes": asdict(estimated)} if estimated else None
        return {
            "run_directory": str(self.run.paths.directory),
            **values,
            "engine": self.run.config.engine,
            "engine_reason": engine_choice.why(self.run.config),
            "proposal": self.run.proposal.as_dict() if self.run.proposal else None,
            "sharding": self.fit.sharding if self.fit else None,
            "pipeline": self.fit.pipeline if self.fit else None,
            "memory": memory,
            "checkpoint_memory": self.fit.checkpoint_memory if self.fit else None,
            "memory_unknown": self.fit.unknown if self.fit else None,
            "certificate": asdict(self.certificate) if self.certificate else None,
            "steps_per_epoch": self.steps.per_epoch if self.steps else None,
            "total_steps": self.steps.total if self.steps else None,
            "refused": self.refused,
            "other_jobs": [asdict(job) for job in self.other_jobs],
        }


def preview(run: Run, launchers: Launchers) -> Preview:
    """Raises UserError as `check_run` does."""
    fit = check_run(run)
    decision = decide(run)
    will_run = {stage.name for stage in decision.stages}
    rows = run.config.rows_per_step(run.plan.degrees.data_parallel)
    return Preview(
        run=run,
        stages=tuple(
            StagePreview(stage, stage.name in will_run, run.journal.why_not_done(stage.name))
            for stage in run.plan.stages
        ),
        fit=fit,
        certificate=run.journal.certificate(),
        available_bytes=available(run.config),
        steps=steps(run),
        rows_per_step=rows,
        tokens_per_step=rows * run.config.row_tokens,
        refused=str(decision.refused or ""),
        other_jobs=tuple(job for launcher in launchers.known for job in launcher.previews(run, decision.stages)),
    )


def check_run(run: Run) -> TrainingFit | None:
    """The estimate of what the training needs; None while the model is not here.

    Refuses now what would fail in a job later, as far as this machine can see it: prompts that do not
    match the dataset's format, local files without the split, an interpreter that does not exist and, for a model that
    is here already, degrees that do not divide it, accelerators that it does not fit, and tensors that could not be
    consolidated (stage download checks any other). Raises UserError.
    """
    for dataset in (part.dataset for part in run.config.dataset.parts):
        if kind_of(dataset.source) == "local" and (path := Path(dataset.source)).exists():
            source_files.chosen(names_below(path), dataset.source, dataset.files, dataset.split)
    asked = run.config.dataset.questions
    for number, prompt in enumerate(run.config.generate.prompts):
        # a chat takes the model's own template
        if isinstance(prompt, dict):
            check_prompt(asked, prompt, f"generate.prompts.{number}")
    if run.config.env.container:
        _check_container(run)
    elif run.config.env.python:
        _check_python(run.config, Path(run.config.env.python))
    # HyperPod's nodes all have the system of this one; elsewhere doctor and stage env say so
    on_hyperpod = HYPERPOD.is_dir() and not run.config.has_other_interpreters
    if on_hyperpod and torch_neuron.is_installed_for(run.config) and (problem := torch_neuron.system_problem()):
        raise UserError(f"env: {problem}", torch_neuron.REMEDY)
    tracking = run.config.tracking.python
    if tracking and not run.config.has_other_interpreters and not Path(tracking).exists():
        raise UserError(f"tracking.python: no such file: {tracking}", "correct it, or leave it out")
    directory = config_directory(run.config)
    if directory is None:
        return None
    certificate, teacher = run.journal.certificate(), teacher_here(run.config)
    fit = check_all_nodes(run.config, run.plan.degrees, directory, certificate, teacher)
    check_trainable(run)
    return fit


def _check_container(run: Run) -> None:
    """Its image and mounts; and srun, where there is a Slurm here."""
    container.check_mounts(run.config)
    image = run.config.env.container
    # a laptop lacks the volume
    if image and image.startswith("/") and run.paths.root.parent.exists() and not Path(image).exists():
        raise UserError(f"env.container: no such file: {image}", "correct it")
    site = SlurmSite(slurm_of(run).environment)
    with contextlib.suppress(SlurmUnreachableError):
        if site.configured and (problem := pyxis_problem(site)):
            raise UserError(f"env.container: {problem}", PYXIS)


def _check_python(config: RunConfig, python: Path) -> None:
    if config.has_other_interpreters and not python.exists():
        return  # it may be the image's
    if not python.exists():
        raise UserError(f"env.python: no such file: {python}", "correct it, or leave it out")
    kind = environment_kind(rules_of(config.engine).environment_name(config))
    versions = PYTHON_VERSIONS.get(kind)
    named = re.fullmatch(r"python(3\.\d+)", python.resolve().name)
    if versions and named and named[1] not in versions:
        raise UserError(
            f"env.python: {python} is Python {named[1]}, and engine {config.engine} on"
            f" {config.cluster.instance_type} needs {' or '.join(versions)}",
            "choose another interpreter, or leave it out",
        )
