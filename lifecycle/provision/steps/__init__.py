"""The steps, in the order in which they run."""

from __future__ import annotations

from provision.step import Step
from provision.steps.identify import Identify
from provision.steps.logrotate import Logrotate
from provision.steps.prolog_epilog import PrologEpilog

STEPS: tuple[Step, ...] = (
    Identify(),
    Logrotate(),
    PrologEpilog(),
)
