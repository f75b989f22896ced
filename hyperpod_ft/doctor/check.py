"""A check that a cluster is as a run needs it: what it is given, how it runs, and how doctor words a finding.

A check is given the run file's settings, or what is common to all runs without one.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from hyperpod_ft.annexes import slurm_conf
from hyperpod_ft.config.instances import Instance
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.findings import Finding, warning
from hyperpod_ft.launch.slurm.site import SlurmNode, SlurmSite
from hyperpod_ft.planning.engine_rules import rules_of


@dataclass(frozen=True)
class Expectations:
    """`config` None: no run file was given. `site` is asked at most once for its nodes."""

    root: Path
    config: RunConfig | None = None
    site: SlurmSite = field(default_factory=SlurmSite)

    @classmethod
    def of(cls, config: RunConfig | None, root: Path) -> "Expectations":
        """With the Slurm of SLURM_CONF or of the system, or else the local cluster that is up."""
        uses_local = config is None or config.cluster.instance_type == "local"
        if uses_local and "SLURM_CONF" not in os.environ and (local := slurm_conf("")):
            return cls(root, config, SlurmSite({"SLURM_CONF": str(local)}))
        return cls(root, config)

    @property
    def environment_name(self) -> str | None:
        """The name of the file in pins/ for the environment that stage env builds; None if it builds none."""
        if self.config is None or self.config.env.python is not None or self.container:
            return None
        return rules_of(self.config.engine).environment_name(self.config)

    @property
    def container(self) -> str:
        """The image that the run's stages run in; empty without one."""
        return (self.config.env.container if self.config else None) or ""

    @property
    def instance(self) -> Instance | None:
        """The training nodes' type."""
        return self.config.instance if self.config else None

    @cached_property
    def nodes(self) -> list[SlurmNode]:
        """The nodes of the run's partitions, once for each; without a run file, all. Raises UserError without Slurm."""
        found = self.site.nodes()
        return [node for node in found if node.partition in self.partitions] if self.config else found

    @cached_property
    def training_partition(self) -> str:
        """The partition of training: the run file's, or Slurm's default. Raises UserError if Slurm does not answer."""
        given = self.config.cluster.partition if self.config else None
        return given or self.site.default_partition()

    @cached_property
    def partitions(self) -> tuple[str, ...]:
        """The partitions that the run uses; none without a run file."""
        if self.config is None:
            return ()
        return tuple(filter(None, dict.fromkeys((self.training_partition, self.config.cluster.cpu_partition))))

    @property
    def writable(self) -> Path:
        """The root, or its closest parent that exists."""
        return next(path for path in (self.root, *self.root.parents) if path.is_dir())


WORDS = {"ok": "ok", "error": "differs", "warning": "cannot tell"}  # by verdict


@dataclass(frozen=True)
class DoctorCheck:
    """`name`: the finding's, if the check gives a single one; also that of the warning when the check fails."""

    name: str
    run: Callable[[], Finding | Iterable[Finding]]


def run_checks(checks: Sequence[DoctorCheck]) -> list[Finding]:
    """All findings, in the order of the checks. A check that fails gives a warning, with the reason."""
    with ThreadPoolExecutor() as pool:
        return [row for rows in pool.map(_run, checks) for row in rows]


def described(row: Finding) -> str:
    """A row without its name: `differs: what there is; what to do`."""
    return f"{WORDS[row.verdict]}: {row.found}" + (f"; {row.remedy}" if row.remedy else "")


def _run(check: DoctorCheck) -> list[Finding]:
    try:
        found = check.run()
        return [found] if isinstance(found, Finding) else list(found)
    except UserError as problem:
        return [warning(check.name, problem.problem, problem.remedy)]
    except OSError as problem:
        return [warning(check.name, f"{problem.filename or 'this machine'}: {problem.strerror or problem}")]
    except Exception as bug:  # such as in reading what an unknown Slurm prints: the other rows still help
        return [warning(check.name, f"hyperpod-ft has a bug: {bug!r}", "report it, with the text of --report")]
