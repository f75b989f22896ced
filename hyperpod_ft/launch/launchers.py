"""The launchers a run may have used, and which of them a command asks."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.process.launcher import ProcessLauncher
from hyperpod_ft.launch.protocol import JobState, Launcher
from hyperpod_ft.launch.sagemaker.launcher import SageMakerLauncher
from hyperpod_ft.launch.slurm.launcher import SlurmLauncher
from hyperpod_ft.localcluster import LocalCluster, default_directory
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.run import Run


@dataclass(frozen=True)
class Launchers:
    """Slurm, the plain processes of this machine, and SageMaker. Each is asked only about its own jobs."""

    slurm: SlurmLauncher = field(default_factory=SlurmLauncher)
    process: Launcher = field(default_factory=ProcessLauncher)
    sagemaker: Launcher = field(default_factory=SageMakerLauncher)

    @classmethod
    def of(cls, run: Run) -> "Launchers":
        """The launchers, with the Slurm that the run was last submitted to, if it still exists.

        For a run that was not: the local cluster, for instance type `local`, when it is up and SLURM_CONF is not set.
        """
        for job in reversed(run.jobs()):
            if job.slurm_conf and not job.cluster_is_gone:
                return cls(SlurmLauncher({"SLURM_CONF": job.slurm_conf}))
        cluster = LocalCluster(default_directory())
        if run.config.cluster.instance_type == "local" and "SLURM_CONF" not in os.environ and cluster.conf.exists():
            return cls(SlurmLauncher(cluster.environment()))
        return cls()

    def named(self, name: str) -> Launcher:
        for launcher in self._all:
            if launcher.name == name:
                return launcher
        raise UserError(f"--launcher {name}: unknown", f"known: {', '.join(known.name for known in self._all)}")

    def refresh(self, run: Run) -> None:
        """Bring the run's small files here, where its jobs write elsewhere. Starts nothing."""
        for launcher, _ in self._by_launcher(run.unfinished_jobs()):
            launcher.refresh(run)

    def advance(self, run: Run) -> str:
        """Refresh, and create the job that this program must create; returns its id, or an empty string."""
        created = [launcher.advance(run) for launcher, _ in self._by_launcher(run.unfinished_jobs())]
        return next(filter(None, created), "")

    def fetch_log(self, run: Run, job: Job) -> None:
        """Bring the log of a job here, where the job cannot write it here itself."""
        for launcher, _ in self._by_launcher([job]):
            launcher.fetch_log(run, job)

    def states(self, run: Run, jobs: Sequence[Job]) -> dict[str, JobState]:
        """State by job id, of those jobs that their launchers still know."""
        states: dict[str, JobState] = {}
        for launcher, of_launcher in self._by_launcher(jobs):
            states |= launcher.states(run, of_launcher)
        return states

    def active(self, run: Run, also: str = "") -> list[Job]:
        """Jobs of this run that have not ended. One that a killed submission left unrecorded is recorded here.

        Asks the launchers that the run has used, and the one named `also`.
        """
        active: list[Job] = []
        for launcher, of_launcher in self._by_launcher(run.jobs(), also):
            active += launcher.active(run, of_launcher)
        for job in active:
            if job not in run.jobs():
                run.add_job(job)
        return active

    def at_work(self, run: Run, also: str = "") -> list[Job]:
        """The active jobs whose stage has no record yet: with one, a job is about to end. As `active` otherwise."""
        return [job for job in self.active(run, also) if not run.is_done(job.stage)]

    def active_or_by_hand(self, run: Run) -> list[Job]:
        """As `active`. For a run without recorded jobs, Slurm is asked: its scripts may have been submitted by hand.

        Raises UserError when a launcher that the run has used does not answer.
        """
        try:
            return self.active(run, also="" if run.jobs() else self.slurm.name)
        except UserError:
            if run.jobs():
                raise
            return []  # no Slurm on this machine

    def cancel(self, run: Run, jobs: Sequence[Job]) -> None:
        for launcher, of_launcher in self._by_launcher(jobs):
            launcher.cancel(run, of_launcher)

    @property
    def _all(self) -> tuple[Launcher, ...]:
        return (self.slurm, self.process, self.sagemaker)

    def _by_launcher(self, jobs: Sequence[Job], also: str = "") -> Iterator[tuple[Launcher, list[Job]]]:
        """The launchers that may still have some of the jobs, with these; and the one named `also`."""
        for launcher in self._all:
            of_launcher = [job for job in jobs if job.launcher == launcher.name and not job.cluster_is_gone]
            if of_launcher or launcher.name == also:
                yield launcher, of_launcher
