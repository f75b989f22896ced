"""The training jobs of a run: which stages each one runs, on what, and under which name; and the files
that decide what its containers run."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft.config.fields import time_limit_seconds
from hyperpod_ft.config.instances import CATALOGUE
from hyperpod_ft.digests import files_sha256, text_sha256
from hyperpod_ft.planning.plan import StagePlan
from hyperpod_ft.runs import job_files
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker.section import SAGEMAKER, sagemaker_section, slug, store_of

FROZEN = ("run.yaml", "plan.json")  # of a run directory; with the scripts, they decide what a container runs
GROUPS: dict[str, tuple[str, ...]] = {
    "prepare": ("env", "download", "certify", "dataset", "reward"),
    "train": ("precompile", "train"),
    "finish": ("consolidate", "merge", "generate"),
}
NO_MAIL = "SageMaker sends no mail: it has no effect on training jobs"  # what is wrong with cluster.mail_user
_MAX_NAME_LENGTH = 63  # of a training job
_MAX_NUMBER_DIGITS = 4


@dataclass(frozen=True)
class StageGroup:
    """Stages of a run that one training job runs, one after the other."""

    name: str  # a key of GROUPS
    stages: tuple[StagePlan, ...]

    @property
    def starts_ranks(self) -> bool:
        return any(stage.starts_ranks for stage in self.stages)

    @property
    def nodes(self) -> int:
        return max(stage.resources.nodes for stage in self.stages)

    @property
    def seconds(self) -> int:
        """The time limit: the sum of its stages' limits."""
        return sum(time_limit_seconds(stage.resources.time_limit) for stage in self.stages)

    def instance_type(self, run: Run) -> str:
        """The training's type if a stage trains or needs whole nodes, otherwise the type for CPUs; without `ml.`."""
        whole = any(stage.resources.exclusive for stage in self.stages)
        cluster = run.config.cluster.instance_type
        return cluster if self.starts_ranks or whole else sagemaker_section(run.config).cpu_instance_type

    def instance_types(self, run: Run) -> tuple[str, ...]:
        """The types that SageMaker may choose from, the best first; without `ml.`."""
        first = self.instance_type(run)
        of_training = first == run.config.cluster.instance_type
        return (first, *(sagemaker_section(run.config).other_instance_types if of_training else ()))

    def accelerated(self, run: Run) -> bool:
        known = CATALOGUE.get(self.instance_type(run))
        return known is not None and known.has_accelerators


@dataclass(frozen=True)
class RecordedJob:
    """A training job that a submission has recorded, created or not, and the stages it is for."""

    name: str
    group: str
    number: int
    stages: tuple[str, ...]
    submitted: str  # of the submission that began it: a job that continues another has the same
    code: str  # name of the copy of the kit's code that it runs


def groups(stages: Iterable[StagePlan]) -> list[StageGroup]:
    """These stages in their groups, in order."""
    chosen = {stage.name: stage for stage in stages}
    found = [StageGroup(name, tuple(chosen[stage] for stage in of if stage in chosen)) for name, of in GROUPS.items()]
    return [group for group in found if group.stages]


def name_prefix(run: Run) -> str:
    """How the names of all training jobs of a run begin.

    Names are unique in an account and region, and two runs of one recipe in two places are two runs: a digest of the
    store or the file system's directory is part of it. Two machines that submit a run to one place mean the same run.
    """
    section = sagemaker_section(run.config)
    mounted = section.file_system
    place = f"{mounted.id}:{mounted.directory}" if mounted else f"{store_of(run.config)}"
    tail = f"{run.plan.run_id}-{text_sha256(place)[:4]}-"
    room = _MAX_NAME_LENGTH - len(tail) - 1 - max(map(len, GROUPS)) - 1 - _MAX_NUMBER_DIGITS
    return f"{slug(run.config, room)}-{tail}"


def job_name(run: Run, group: str, number: int) -> str:
    return f"{name_prefix(run)}{group}-{number}"


def number_of(name: str) -> int:
    """The number after the last hyphen: of a training job's name, or the step in that of a checkpoint."""
    return int(name.rpartition("-")[2])


def training_jobs(run: Run) -> list[Job]:
    """The recorded training jobs with names of this run. Another name in jobs.json, which containers may write, is left
    out: nothing is asked of SageMaker about jobs that are not this run's."""
    own = re.compile(f"{re.escape(name_prefix(run))}({'|'.join(GROUPS)})-[0-9]{{1,{_MAX_NUMBER_DIGITS}}}")
    return [job for job in run.journal.jobs() if job.launcher == SAGEMAKER and own.fullmatch(job.job_id)]


def next_number(run: Run, group: str, others: Iterable[str] = ()) -> int:
    """The first number that no job of the group has had: of those recorded or marked as cancelled, and of `others`,
    further names."""
    beginning = f"{name_prefix(run)}{group}-"
    names = [job.job_id for job in training_jobs(run)]
    # a submission that failed may have left marks without the record of its jobs
    marks = [run.paths.cancel_marker(stage.name, f"{beginning}*") for stage in run.plan.stages]
    names += [found.stem[found.stem.index(beginning) :] for mark in marks for found in mark.parent.glob(mark.name)]
    taken = [number_of(name) for name in [*names, *others] if name.startswith(beginning)]
    return max(taken, default=0) + 1


def recorded_jobs(run: Run) -> list[RecordedJob]:
    """The training jobs of the newest submission, in the order of the groups: of each stage the newest."""
    ours = training_jobs(run)
    # in the order in which they were recorded: the clocks of two machines may differ
    submitted = ours[-1].submitted if ours else ""
    newest = {job.stage: job for job in ours if job.submitted == submitted}
    found = []
    for group, of in GROUPS.items():
        by_name: dict[str, list[Job]] = {}
        for stage in of:
            if stage in newest:
                by_name.setdefault(newest[stage].job_id, []).append(newest[stage])
        for name, of_job in sorted(by_name.items(), key=lambda item: number_of(item[0])):
            stages = tuple(job.stage for job in of_job)
            found.append(RecordedJob(name, group, number_of(name), stages, submitted, of_job[0].code))
    return found


def run_files(run_directory: Path) -> dict[str, Path]:
    """The plan and the scripts of the stages of training jobs, by their names below the run directory."""
    files = [run_directory / name for name in FROZEN]
    files += [job_files.script(run_directory, stage) for stages in GROUPS.values() for stage in stages]
    return {file.relative_to(run_directory).as_posix(): file for file in files if file.is_file()}


def run_files_digest(run_directory: Path) -> str:
    """Whoever creates a job computes it from the files that it has itself; in a store, everyone who may write there
    could change them."""
    return files_sha256(run_files(run_directory))
