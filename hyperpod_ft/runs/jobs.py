"""The jobs that were submitted for a run: the entries of its jobs.json."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """One submission of one stage."""

    stage: str
    job_id: str
    launcher: str
    submitted: str  # ISO 8601, UTC
    slurm_conf: str = ""  # of the cluster it was submitted to, when one was named

    @property
    def cluster_is_gone(self) -> bool:
        """Whether it was a local cluster that has ended: its slurm.conf exists only while it runs."""
        return bool(self.slurm_conf) and not Path(self.slurm_conf).exists()
