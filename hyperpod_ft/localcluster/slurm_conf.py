"""Render slurm.conf and cgroup.conf of a local cluster (pure), for Slurm 21.08 and newer.

The `none` plugins (accounting, task, switch, mpi) are omitted on purpose: they are every version's default, and some
versions no longer accept their names.
"""

import json
from dataclasses import dataclass
from pathlib import Path

MAX_NODES = 127


@dataclass(frozen=True)
class ClusterSpec:
    """The size of a local cluster, its ports, first job id and Slurm. Sizes are per node; memory is in MiB."""

    nodes: int
    cpus: int
    memory_mb: int
    first_port: int
    first_job_id: int
    slurm_version: str

    @property
    def node_names(self) -> tuple[str, ...]:
        """node1, node2, ..."""
        return tuple(f"node{number}" for number in range(1, self.nodes + 1))

    @property
    def ports(self) -> tuple[int, ...]:
        """slurmctld's port, then each node's."""
        return tuple(range(self.first_port, self.first_port + self.nodes + 1))

    @staticmethod
    def from_json(text: str) -> "ClusterSpec":
        """Read the specification from the JSON of its fields."""
        return ClusterSpec(**json.loads(text))


def render_slurm_conf(spec: ClusterSpec, runtime: Path, user: str, host: str) -> str:
    """The text of slurm.conf. `runtime` must be a path that Slurm accepts: short, ASCII, without spaces.

    cred_expire: a requeued job waits until its old credential has expired; the default of 120 s would make rehearsed
    node losses take minutes. Below 5 Slurm silently uses the default.
    ReturnToService=1: a lost node returns to service automatically, one set to DOWN does not, as on HyperPod.
    MinJobAge: without accounting, slurmctld forgets finished jobs, and `afterok` on an unknown job counts as
    satisfied.
    """
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
        f" CPUs={spec.cpus} RealMemory={spec.memory_mb} State=UNKNOWN"
        for name, port in zip(spec.node_names, spec.ports[1:], strict=True)
    ]
    return "\n".join(
        [
            "# Written by `hyperpod-ft local up`; lives as long as the cluster does.",
            "ClusterName=local",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={spec.ports[0]}",
            f"SlurmUser={user}",
            f"SlurmdUser={user}",
            "AuthType=auth/munge",
            f"AuthInfo=socket={runtime}/munge.socket,cred_expire=5",
            f"StateSaveLocation={runtime}/state",
            f"SlurmdSpoolDir={runtime}/spool/%n",
            f"SlurmctldPidFile={runtime}/slurmctld.pid",
            f"SlurmdPidFile={runtime}/slurmd.%n.pid",
            f"SlurmctldLogFile={runtime}/logs/slurmctld.log",
            f"SlurmdLogFile={runtime}/logs/slurmd.%n.log",
            "SlurmctldDebug=info",
            "SlurmdDebug=info",
            f"FirstJobId={spec.first_job_id}",
            "ProctrackType=proctrack/linuxproc",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            # Use the CPUs and memory given here, so that several ranks fit on a small machine.
            "SlurmdParameters=config_overrides",
            "SchedulerParameters=sched_min_interval=0,sched_interval=2,bf_interval=1,batch_sched_delay=0",
            "ReturnToService=1",
            "JobRequeue=1",
            "MailProg=/bin/true",  # a rehearsal sends no mail
            "MinJobAge=86400",
            "MessageTimeout=30",
            "SlurmdTimeout=300",
            *nodes,
            "PartitionName=dev Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
            "",
        ]
    )


def render_cgroup_conf(version: tuple[int, int]) -> str:
    """The text of cgroup.conf: touch no cgroup, which an ordinary user and a container may not.

    Until 24.05 slurmd looks for cgroups v2 with systemd unless set to v1, which it then does not touch.
    """
    return f"CgroupPlugin={'disabled' if version >= (24, 5) else 'cgroup/v1'}\n"
