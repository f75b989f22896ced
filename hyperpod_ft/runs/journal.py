"""Journal: what happened to a run, as its files say: records, jobs, submissions, and how far its training is."""

import contextlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError, printable
from hyperpod_ft.planning.certificate import Certificate
from hyperpod_ft.planning.plan import Plan
from hyperpod_ft.runs.jobs import Job, Submission
from hyperpod_ft.runs.records import CARD, Record, image_state
from hyperpod_ft.runs.run_paths import RunPaths

_JOBS = TypeAdapter(list[Job])
_SUBMISSION = TypeAdapter(Submission)
_SIZES = TypeAdapter(dict[str, int])


@dataclass(frozen=True)
class Journal:
    """What is written about a run at its paths. Reads the files at each call: jobs on other machines write them."""

    paths: RunPaths
    plan: Plan

    @property
    def is_own(self) -> bool:
        """Whether the run is this user's, or not there yet; otherwise its files say what somebody else wants."""
        try:
            return self.paths.config_path.lstat().st_uid == os.getuid()
        except FileNotFoundError:
            return True

    # Stages

    def record(self, stage: str) -> Record | None:
        return Record.read(self.paths.record_path(stage))

    def valid_record(self, stage: str) -> Record | None:
        """The record of a stage of the plan, unless it was made with another configuration."""
        record = self.record(stage) if stage in self.plan else None
        return record if record and record.fingerprint == self.plan[stage].fingerprint else None

    def ends_of_turns(self) -> list[int]:
        """The ids with which training ends the answers of conversations; empty for rows of other formats."""
        prepared = self.record("dataset")
        chats = prepared.facts.get("chats") if prepared else None
        return [int(end["token"]) for end in chats["ends"]] if chats else []

    def certificate(self) -> Certificate | None:
        """What stage certify proved; None before it, and where the engine has no such stage."""
        record = self.valid_record("certify")
        return Certificate.of(record.facts) if record else None

    def evaluation_records(self) -> list[Path]:
        """The records of stage `eval`, one for each set of tasks and settings."""
        return sorted((self.paths.directory / "records").glob("eval-*.json"))

    def why_not_done(self, stage: str) -> str:
        """Why the stage must run; empty when its record is valid and its outputs exist, here or in the run's store."""
        record = self.record(stage)
        if record is None:
            return "has not run"
        if record.fingerprint != self.plan[stage].fingerprint:
            return "its configuration changed"
        image = self.paths.image if stage == "env" else None
        # jobs in it may not see its file
        if image and (seen := image_state(image)) and seen != record.facts.get("image"):
            return f"{image} was replaced"
        in_store: dict[str, int] | None = None
        for output in record.outputs:
            try:
                size = os.stat(f"{self.paths.root}/{output.path}").st_size  # noqa: PTH116 - a third of Path.stat's time
            except OSError:
                in_store = self.sizes_in_store() if in_store is None else in_store
                if output.path not in in_store:
                    return f"{output.path} no longer exists"
                size = in_store[output.path]
            if size != output.size and Path(output.path).name != CARD:
                return f"{output.path} has {size} bytes, was {output.size}"
        return ""

    def sizes_in_store(self) -> dict[str, int]:
        """What the store's listing holds; empty without one."""
        try:
            return _SIZES.validate_json(self.paths.store_listing.read_bytes())
        except (OSError, ValueError):
            return {}

    def is_done(self, stage: str) -> bool:
        return not self.why_not_done(stage)

    def require_done(self, stage: str, missing: str) -> None:
        """Raise UserError unless the stage is done; `missing`: what there is not without it."""
        if reason := self.why_not_done(stage):
            directory = self.paths.directory
            finished = self.is_done(self.plan.model_stage)  # there is nothing to resume
            again = self.submit_command(f"{self.paths.config_path} --only {stage}")
            command = again if finished else f"hyperpod-ft resume {directory}"
            raise UserError(f"{directory}: {missing}: stage {stage}: {reason}", f"run: {command}")

    # Jobs

    def jobs(self) -> list[Job]:
        """Every submission so far, oldest first."""
        try:
            return _JOBS.validate_json(self.paths.jobs_path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except ValueError as error:
            raise UserError(
                f"{self.paths.jobs_path}: is damaged", "restore it, or cancel the run's jobs (see squeue) and remove it"
            ) from error

    def add_job(self, job: Job) -> None:
        publish.write_text(self.paths.jobs_path, f"{_JOBS.dump_json([*self.jobs(), job], indent=2).decode()}\n")

    def latest_jobs(self) -> dict[str, Job]:
        """The newest submission of each stage."""
        return {job.stage: job for job in self.jobs()}

    def unfinished(self, jobs: Mapping[str, Job]) -> list[Job]:
        """Those of the jobs, by stage, whose stage is not done."""
        return [job for stage, job in jobs.items() if stage in self.plan and not self.is_done(stage)]

    @property
    def last_launcher(self) -> str:
        """The launcher of its newest submission; Slurm's before the first."""
        return next((job.launcher for job in reversed(self.jobs())), "slurm")

    def submit_command(self, arguments: str) -> str:
        """`submit` with these arguments, and with the launcher that the run has used last."""
        launcher = self.last_launcher
        return f"hyperpod-ft submit {arguments}{'' if launcher == 'slurm' else f' --launcher {launcher}'}"

    def exit_status(self, stage: str, job_id: str) -> int | None:
        """The exit status that the job left; 1 for a file that is damaged or closed to this user, None without one."""
        try:
            content = self.paths.exit_marker(stage, job_id).read_bytes().strip()
        except FileNotFoundError:
            return None
        except (PermissionError, IsADirectoryError):
            return 1
        return int(content) if content.isdigit() else 1

    def log_here(self, stage: str, job_id: str) -> Path | None:
        """The job's log, or what CloudWatch has of it, if one of them is here."""
        logs = (self.paths.log(stage, job_id), self.paths.fetched_log(stage, job_id))
        return next((log for log in logs if log.exists()), None)

    # Submissions

    def submissions(self) -> list[Submission]:
        """Oldest first; damaged files are left out. Raises OSError when one cannot be read."""
        submissions = []
        for path in sorted(self.paths.provenance.glob("submission-*.json")):
            with contextlib.suppress(ValueError):
                submissions.append(_SUBMISSION.validate_json(path.read_bytes()))
        return submissions

    def add_submission(self, submission: Submission, timestamp: str) -> None:
        """`timestamp`: a part of the file's name; later ones are greater."""
        publish.write_json(self.paths.provenance / f"submission-{timestamp}.json", asdict(submission))

    @property
    def submitted_as(self) -> str:
        """The run file or recipe that was submitted, with its overrides, as arguments of `submit`; else empty."""
        try:
            return shlex.join(shlex.split(printable(self.paths.origin.read_text(encoding="utf-8").strip())))
        except (OSError, ValueError):
            return ""

    # How far the training is

    def last_written_step(self) -> int:
        """The step of the checkpoint that was written last, or 0 without one.

        Not the highest step: when a checkpoint is damaged, training resumes from an earlier one.
        """
        written = []
        for step, path in self.paths.checkpoints_by_step().items():
            with contextlib.suppress(OSError):  # just deleted
                written.append((path.stat().st_mtime_ns, step))
        return max(written, default=(0, 0))[1]

    def references_measured(self) -> int:
        """How many of DPO's reference log-probabilities are stored.

        Their number, not when they were written, shows progress: a job may measure the same part as the one before it.
        """
        try:
            return int(self.paths.reference_count.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return 0
