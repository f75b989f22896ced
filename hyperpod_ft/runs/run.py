"""Run: one execution of a plan: opening it, and what is known of it."""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from hyperpod_ft import publish
from hyperpod_ft.config import run_file, yaml_text
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.digests import file_sha256, files_below, text_sha256
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.automatic.choice import Proposal, propose
from hyperpod_ft.planning.plan import Plan, plan
from hyperpod_ft.runs.assets import model_config
from hyperpod_ft.runs.jobs import SAGEMAKER, Job, Submission
from hyperpod_ft.runs.records import CARD, Output, Record
from hyperpod_ft.runs.run_paths import RunPaths

JOB_COMMENT = "hyperpod-ft:"  # how the comment of every job of this kit begins
_JOBS = TypeAdapter(list[Job])
_SUBMISSION = TypeAdapter(Submission)
_SIZES = TypeAdapter(dict[str, int])


@dataclass(frozen=True)
class _Planned(Plan):
    """plan.json: the plan, and the values of run.yaml, since JSON is read in a hundredth of the time."""

    config: dict[str, Any] = field(default_factory=dict)
    run_file_sha256: str = ""  # of the run.yaml that has these values
    replaced_sha256: str = ""  # of the one before it, which a kill between the two files leaves

    def config_of(self, frozen: Path) -> RunConfig:
        """The config in run.yaml, which may have been edited since. Raises UserError."""
        with contextlib.suppress(OSError):  # reading it again gives the user's error
            if file_sha256(frozen) in (self.run_file_sha256, self.replaced_sha256):
                return run_file.validate(self.config, str(frozen))
        return run_file.open_frozen(frozen)


_PLANNED = TypeAdapter(_Planned)


@dataclass(frozen=True)
class Run(RunPaths):
    """A resolved run file, its plan, and where its execution lives."""

    proposal: Proposal | None = field(default=None, compare=False)  # of degrees, if they were just chosen

    @classmethod
    def of(cls, config: RunConfig) -> "Run":
        """The run of a resolved run file; with `parallelism.degrees: auto` its config has the degrees chosen.

        Raises UserError when the degrees do not divide, or cannot be chosen.
        """
        if config.parallelism.degrees == "manual":
            return cls(config, plan(config))
        proposal = propose(config, model_config(config))
        return cls(proposal.chosen.config, plan(proposal.chosen.config), proposal)

    @classmethod
    def open(cls, directory: Path) -> "Run":
        """The run in a run directory, as it was planned: another version of the kit may plan it differently.

        Raises UserError when it is not a run directory, is damaged, or was moved away from its root.
        """
        frozen = directory / "run.yaml"
        if not frozen.is_file():
            raise UserError(f"{directory}: no run.yaml in it", "give a run directory; `hyperpod-ft list` shows them")
        try:
            planned = _PLANNED.validate_json((directory / "plan.json").read_bytes())
        except (FileNotFoundError, ValueError) as error:
            raise UserError(
                f"{directory}: its plan.json is missing or damaged", f"submit {frozen} as a run file"
            ) from error
        except OSError as error:
            raise UserError(
                f"{directory}: its plan.json cannot be read: {error.strerror}", "repair the volume, then resume"
            ) from error
        run = cls(planned.config_of(frozen), Plan(planned.stages, planned.degrees))
        if run.directory != directory and run.directory.resolve() != directory.resolve():
            raise UserError(
                f"{frozen}: was edited or moved: it describes the run {run.directory}",
                f"submit it as a run file: hyperpod-ft submit {frozen}",
            )
        return run

    def freeze(self) -> None:
        """Write what `open` reads. Makes the directory; its run.yaml, which makes it a run's, comes last.

        A kill between the two files leaves the new plan with its values, and the next `freeze` completes it.
        """
        text = self.yaml()
        values = {
            "run_file_sha256": text_sha256(text),
            "replaced_sha256": file_sha256(self.config_path) if self.config_path.exists() else "",
            "config": self.config.model_dump(mode="json"),
        }
        publish.write_json(self.plan_path, self.plan.as_dict() | values)
        publish.write_text(self.config_path, text)

    def yaml(self) -> str:
        """The resolved run file."""
        return yaml_text.dump(self.config)

    def job_name(self, stage: str) -> str:
        return f"{self.config.name}-{stage}"

    @property
    def job_comment(self) -> str:
        """Names this run directory in Slurm: two runs of one recipe below two roots are two runs.

        A digest, since Slurm's listings leave no path with spaces whole. `root` was made absolute when the run file
        was loaded.
        """
        return f"{JOB_COMMENT}{self.plan.run_id}@{text_sha256(str(self.directory))[:12]}"

    def record(self, stage: str) -> Record | None:
        return Record.read(self.record_path(stage))

    def valid_record(self, stage: str) -> Record | None:
        """The record of a stage of the plan, unless it was made with another configuration."""
        record = self.record(stage) if stage in self.plan else None
        return record if record and record.fingerprint == self.plan[stage].fingerprint else None

    def why_not_done(self, stage: str) -> str:
        """Why the stage must run; empty when its record is valid and its outputs exist, here or in the run's store."""
        record = self.record(stage)
        if record is None:
            return "has not run"
        if record.fingerprint != self.plan[stage].fingerprint:
            return "its configuration changed"
        in_store: dict[str, int] | None = None
        for output in record.outputs:
            try:
                size = os.stat(f"{self.root}/{output.path}").st_size  # noqa: PTH116 - a third of Path.stat's time
            except OSError:
                in_store = self.sizes_in_store() if in_store is None else in_store
                if output.path not in in_store:
                    return f"{output.path} no longer exists"
                size = in_store[output.path]
            if size != output.size and Path(output.path).name != CARD:
                return f"{output.path} has {size} bytes, was {output.size}"
        return ""

    def sizes_in_store(self) -> dict[str, int]:
        """What `store_listing` holds; empty without one."""
        try:
            return _SIZES.validate_json(self.store_listing.read_bytes())
        except (OSError, ValueError):
            return {}

    def is_done(self, stage: str) -> bool:
        return not self.why_not_done(stage)

    def require_done(self, stage: str, missing: str) -> None:
        """Raise UserError unless the stage is done; `missing`: what there is not without it."""
        if reason := self.why_not_done(stage):
            raise UserError(
                f"{self.directory}: {missing}: stage {stage}: {reason}", f"run: hyperpod-ft resume {self.directory}"
            )

    def jobs(self) -> list[Job]:
        """Every submission so far, oldest first."""
        try:
            return _JOBS.validate_json(self.jobs_path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except ValueError as error:
            raise UserError(
                f"{self.jobs_path}: is damaged", "restore it, or cancel the run's jobs (see squeue) and remove it"
            ) from error

    @property
    def last_launcher(self) -> str:
        """The launcher of its newest submission; Slurm's before the first."""
        return next((job.launcher for job in reversed(self.jobs())), "slurm")

    @property
    def tuned_model_location(self) -> str:
        """Where the tuned model is, or will be: a path, or a URL of the store that training jobs left it in."""
        if self.config.store and self.last_launcher == SAGEMAKER and not self.tuned_model.exists():
            return self.store_url(self.tuned_model)
        return str(self.tuned_model)

    def latest_jobs(self) -> dict[str, Job]:
        """The newest submission of each stage."""
        return {job.stage: job for job in self.jobs()}

    def unfinished_jobs(self) -> list[Job]:
        """The newest job of each stage that is not done."""
        return [job for stage, job in self.latest_jobs().items() if stage in self.plan and not self.is_done(stage)]

    def exit_status(self, stage: str, job_id: str) -> int | None:
        """The exit status that the job left; 1 for a damaged file, None without one."""
        try:
            text = self.exit_marker(stage, job_id).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        return int(text) if text.isdigit() else 1

    def log_here(self, stage: str, job_id: str) -> Path | None:
        """The job's log, or what CloudWatch has of it, if one of them is here."""
        return next((log for path in (self.log, self.fetched_log) if (log := path(stage, job_id)).exists()), None)

    def add_job(self, job: Job) -> None:
        publish.write_text(self.jobs_path, f"{_JOBS.dump_json([*self.jobs(), job], indent=2).decode()}\n")

    def submissions(self) -> list[Submission]:
        """Oldest first; damaged files are left out. Raises OSError when one cannot be read."""
        submissions = []
        for path in sorted(self.provenance.glob("submission-*.json")):
            with contextlib.suppress(ValueError):
                submissions.append(_SUBMISSION.validate_json(path.read_bytes()))
        return submissions

    def add_submission(self, submission: Submission, timestamp: str) -> None:
        """`timestamp`: a part of the file's name; later ones are greater."""
        publish.write_json(self.provenance / f"submission-{timestamp}.json", asdict(submission))

    def outputs_of(self, paths: Iterable[Path], *, digests: bool = True) -> tuple[Output, ...]:
        """Outputs for a record: every file at or below `paths`, with its size and, unless `digests` is off, SHA-256."""
        files = [file for path in paths for file in files_below(path)]
        return tuple(
            Output(
                self.relative(file),
                file.stat().st_size,
                file_sha256(file) if digests else "",
            )
            for file in files
        )

    def last_written_step(self) -> int:
        """The step of the checkpoint that was written last, or 0 without one.

        Not the highest step: when a checkpoint is damaged, training resumes from an earlier one.
        """
        written = []
        for step, path in self.checkpoints_by_step().items():
            with contextlib.suppress(OSError):  # just deleted
                written.append((path.stat().st_mtime_ns, step))
        return max(written, default=(0, 0))[1]

    def references_measured(self) -> int:
        """How many of DPO's reference log-probabilities are stored.

        Their number, not when they were written, shows progress: a job may measure the same part as the one before it.
        """
        try:
            return int(self.reference_count.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return 0
