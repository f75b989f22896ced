"""When a job that has fewer nodes than its run wants starts again on more: at a checkpoint, once nodes are idle."""

import time
from collections.abc import Sequence

from hyperpod_ft.errors import UserError
from hyperpod_ft.job.job_host import JobHost
from hyperpod_ft.runs.attempts import Attempt
from hyperpod_ft.runs.run import Run

_EVERY_SECONDS = 10.0


class Growth:
    """Of one attempt. `is_due`: the job has been asked to save, and is requeued then."""

    def __init__(self, run: Run, host: JobHost, earlier: Sequence[Attempt]) -> None:
        """`earlier`: the restarts of its submission, oldest first."""
        self.is_due = False
        self._journal, self._host = run.journal, host
        self._step = run.journal.last_written_step()
        self._looked_at = time.monotonic()
        # a job that was requeued for more nodes and did not get them would be again after each checkpoint
        in_vain = any(
            before.cause == "more nodes" and before.checkpoint == self._step and before.nodes >= host.nodes
            for before in earlier[-1:]
        )
        self._wanted = bool(run.nodes_wanted) and not in_vain

    def begins(self) -> bool:
        """Whether it is due from now on. Asks Slurm now and then, after a checkpoint that this attempt has saved."""
        now = time.monotonic()
        if not self._wanted or self.is_due or now - self._looked_at < _EVERY_SECONDS:
            return False
        self._looked_at = now
        if self._journal.last_written_step() == self._step:
            return False
        try:
            self.is_due = self._host.idle_nodes() > 0
        except UserError:  # the controller may answer later
            self.is_due = False
        return self.is_due
