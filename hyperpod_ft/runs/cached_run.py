"""CachedRun: a run as its files were at one moment."""

from dataclasses import dataclass, field

from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.records import Record
from hyperpod_ft.runs.run import Run


@dataclass(frozen=True)
class RecordCache:
    """What was read of records, by fingerprint of the stage."""

    records: dict[str, Record | None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)  # why the stage is not done


@dataclass(frozen=True)
class CachedRun(Run):
    """A run whose jobs are known, and which reads its records and the sizes of their outputs only once.

    Describing a run takes many looks at the same files, and the runs of a root share the records of the first stages.
    """

    _jobs: list[Job] = field(default_factory=list, compare=False)
    _shared: RecordCache = field(default_factory=RecordCache, compare=False)
    _own: RecordCache = field(default_factory=RecordCache, compare=False)

    @classmethod
    def now(cls, run: Run, shared: RecordCache | None = None) -> "CachedRun":
        """The run as it is now; `shared` has what other runs below the same root have read."""
        return cls(run.config, run.plan, run.proposal, run.jobs(), shared or RecordCache())

    def again(self) -> "CachedRun":
        """The run with its records read anew, and the jobs that it had."""
        return CachedRun(self.config, self.plan, self.proposal, self._jobs)

    def jobs(self) -> list[Job]:
        return self._jobs

    def record(self, stage: str) -> Record | None:
        records, fingerprint = self._cache_of(stage).records, self.plan[stage].fingerprint
        if fingerprint not in records:
            records[fingerprint] = super().record(stage)
        return records[fingerprint]

    def why_not_done(self, stage: str) -> str:
        reasons, fingerprint = self._cache_of(stage).reasons, self.plan[stage].fingerprint
        if fingerprint not in reasons:
            reasons[fingerprint] = super().why_not_done(stage)
        return reasons[fingerprint]

    def _cache_of(self, stage: str) -> RecordCache:
        # which outputs a store has is known for each run by itself
        return self._shared if self.plan[stage].shared and not self.config.store else self._own
