"""The steps, in the order in which they run."""

from __future__ import annotations

from provision.step import Step
from provision.steps.accounting import Accounting
from provision.steps.identify import Identify
from provision.steps.logrotate import Logrotate
from provision.steps.metrics import Metrics
from provision.steps.prolog_epilog import PrologEpilog
from provision.steps.slurm import Slurm
from provision.steps.slurm_configuration import SlurmConfiguration

STEPS: tuple[Step, ...] = (
    Identify(),
    Logrotate(),
    PrologEpilog(),
    SlurmConfiguration(),
    Accounting(),
    Slurm(),
    Metrics(),
)
