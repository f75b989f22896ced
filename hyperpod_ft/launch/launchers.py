"""The launchers a run may have used, and which of them a command asks."""

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hyperpod_ft.annexes import launchers
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.interface import JobState, Launcher
from hyperpod_ft.launch.process.launcher import ProcessLauncher
from hyperpod_ft.launch.slurm.launcher import SlurmLauncher, cluster_is_gone
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.run import Run


@dataclass(frozen=True)
class Launchers:
    """Slurm, the plain processes of this machine, and the annexes' launchers. Each is asked only about its own jobs.

    A command makes one object, and passes it to what it calls.
    """

    known: tuple[Launcher, ...] = field(default_factory=lambda: (SlurmLauncher(), ProcessLauncher(), *launchers()))

    def named(self, name: str) -> Launcher:
        for launcher in self.known:
            if launcher.name == name:
                return launcher
        raise UserError(f"--launcher {name}: unknown", f"known: {', '.join(launcher.name for launcher in self.known)}")

    def group_stages(self, job: Job) -> bool:
        """`Launcher.groups_stages` of a job's launcher; not of one that this kit lacks."""
        return any(launcher.groups_stages for launcher in self.known if launcher.name == job.launcher)

    def location(self, run: Run, path: Path) -> str:
        """As `Launcher.location`."""
        last = run.journal.last_launcher
        return next((launcher.location(run, path) for launcher in self.known if launcher.name == last), str(path))

    def bring_outputs(self, run: Run, directories: Sequence[Path]) -> None:
        """As `Launcher.bring_outputs`."""
        for launcher in self.known:
            launcher.bring_outputs(run, directories)

    def bring_small_files(self, run: Run, also: str = "") -> None:
        """Bring the run's small files here, where its jobs write elsewhere. Starts nothing. `also`: as for `active`."""
        for launcher, jobs in self._by_launcher(run.journal.unfinished(run.journal.latest_jobs()), also):
            if not launcher.shares_volume:
                launcher.states(run, jobs)

    def states(self, run: Run) -> Mapping[Job, JobState]:
        """Of the newest jobs whose stages are not done. As `Launcher.states`."""
        unfinished = run.journal.unfinished(run.journal.latest_jobs())
        return dict(ChainMap(*(dict(launcher.states(run, jobs)) for launcher, jobs in self._by_launcher(unfinished))))

    def advance(self, run: Run) -> str:
        """As `Launcher.advance`, with the launchers of the newest jobs whose stages are not done.

        Creates nothing for the run of another user: what would be created, and with which role, is in the run's files.
        """
        if not run.journal.is_own:
            return ""
        unfinished = run.journal.unfinished(run.journal.latest_jobs())
        return next(filter(None, (launcher.advance(run) for launcher, _ in self._by_launcher(unfinished))), "")

    def active(self, run: Run, also: str = "") -> dict[Job, JobState]:
        """Jobs of this run that have not ended. One that a killed submission left unrecorded is recorded here.

        Asks the launchers that the run has used, and the one named `also`.
        """
        active: dict[Job, JobState] = {}
        for launcher, jobs in self._by_launcher(run.journal.jobs(), also):
            active |= {job: state for job, state in launcher.states(run, jobs).items() if state.active}
        recorded = run.journal.jobs()
        for job in active:
            if job not in recorded:
                run.journal.add_job(job)
        return active

    def at_work(self, run: Run, also: str = "") -> dict[Job, JobState]:
        """The active jobs whose stage has no record yet: with one, a job is about to end. As `active` otherwise."""
        return {job: state for job, state in self.active(run, also).items() if not run.journal.is_done(job.stage)}

    def active_or_by_hand(self, run: Run) -> list[Job]:
        """As `active`. For a run without recorded jobs, Slurm is asked: its scripts may have been submitted by hand.

        Raises UserError when a launcher that the run has used does not answer.
        """
        try:
            return list(self.active(run, also="" if run.journal.jobs() else SlurmLauncher.name))
        except UserError:
            if run.journal.jobs():
                raise
            return []  # no Slurm on this machine

    def log(self, run: Run, job: Job) -> Path | None:
        """As `Launcher.log`."""
        for launcher, _ in self._by_launcher([job]):
            return launcher.log(run, job)
        return run.journal.log_here(job.stage, job.job_id)

    def cancel(self, run: Run, jobs: Sequence[Job]) -> None:
        for launcher, of_launcher in self._by_launcher(jobs):
            launcher.cancel(run, of_launcher)

    def _by_launcher(self, jobs: Sequence[Job], also: str = "") -> Iterator[tuple[Launcher, list[Job]]]:
        """The launchers that may still have some of the jobs, with these; and the one named `also`."""
        for launcher in self.known:
            of_launcher = [job for job in jobs if job.launcher == launcher.name and not cluster_is_gone(job)]
            if of_launcher or launcher.name == also:
                yield launcher, of_launcher
