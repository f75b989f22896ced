"""The machines of a HyperPod cluster, and what HyperPod and the kit write about them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FSX_DNS_NAME = "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com"
FSX_MOUNT_NAME = "4owupbev"
FSX_SOURCE = f"{FSX_DNS_NAME}@tcp:/{FSX_MOUNT_NAME}"
CLUSTER_NAME = "ml-cluster"

# settings.json as the kit writes it.
SETTINGS: dict[str, Any] = {
    "version": 1,
    "provisioning": "api",
    "default_user": "ubuntu",
    "fsx": {"dns_name": FSX_DNS_NAME, "mount_name": FSX_MOUNT_NAME, "mount_path": "/fsx"},
    "groups": {"controller-machine": "controller", "login-group": "login", "worker-group-1": "compute"},
    "users": [
        {"name": "alice", "uid": 2001, "gid": 2001, "public_keys": []},
        {"name": "bob", "uid": 2002, "gid": 2002, "public_keys": []},
    ],
    "accounting": False,
}


@dataclass(frozen=True)
class Instance:
    """One machine of an instance group."""

    group: str
    address: str
    instance_id: str
    instance_type: str = "ml.m5.large"

    @property
    def hostname(self) -> str:
        """EC2's: ip-10-1-0-11."""
        return "ip-" + self.address.replace(".", "-")


CONTROLLER = Instance("controller-machine", "10.1.0.11", "i-0123456789abcde11")
WORKERS = tuple(
    Instance("worker-group-1", f"10.1.0.{number}", f"i-0123456789abcde{number}", "ml.trn1.32xlarge")
    for number in (12, 13)
)
LOGIN = Instance("login-group", "10.1.0.14", "i-0123456789abcde14")


def resource_config(cluster: Sequence[Instance]) -> dict[str, Any]:
    """/opt/ml/config/resource_config.json as HyperPod writes it; a group may have no instances yet."""
    groups = {group: [each for each in cluster if each.group == group] for group in SETTINGS["groups"]}

    def describe(place: int, instance: Instance) -> dict[str, Any]:
        return {
            "InstanceName": f"{instance.group}-{place}",
            "InstanceId": instance.instance_id,
            "AgentIpAddress": instance.address.replace("10.1.0.", "172.16.1."),
            "CustomerIpAddress": instance.address,
            "InstanceLabel": None,
        }

    return {
        "ClusterConfig": {
            "ClusterName": CLUSTER_NAME,
            "ClusterArn": "arn:aws:sagemaker:us-west-2:123456789012:cluster/2hd31rmi9mde",
        },
        "ClusterType": "Slurm",
        "InstanceGroups": [
            {
                "Name": group,
                "InstanceType": instances[0].instance_type if instances else "ml.m5.large",
                "Instances": [describe(place, each) for place, each in enumerate(instances, 1)] or None,
            }
            for group, instances in groups.items()
        ],
    }


def slurm_conf(controller: Instance, nodes: Sequence[Instance], *extra: str) -> str:
    """slurm.conf as HyperPod's agent writes it on the controller; `nodes` are those with slurmd, `extra` more lines."""
    return "\n".join(
        [
            f"ClusterName={CLUSTER_NAME}",
            f"SlurmctldHost={controller.hostname}({controller.address})",
            "SlurmctldParameters=enable_configless",
            "SlurmUser=slurm",
            "AuthType=auth/munge",
            "StateSaveLocation=/var/spool/slurmctld",
            "SlurmdSpoolDir=/var/spool/slurmd",
            "SlurmctldLogFile=/var/log/slurm/slurmctld.log",
            "SlurmdLogFile=/var/log/slurm/slurmd.log",
            "SlurmctldPidFile=/run/slurmctld.pid",
            "SlurmdPidFile=/run/slurmd.pid",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "ReturnToService=1",
            "SlurmdTimeout=60",
            "MpiDefault=none",
            # From here: what this machine needs instead of AWS's lines.
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "MessageTimeout=60",
            "SlurmdParameters=config_overrides",
            "SchedulerParameters=sched_min_interval=0,sched_interval=2,bf_interval=1,batch_sched_delay=0",
            "MailProg=/bin/true",
            *(
                f"NodeName={node.hostname} NodeAddr={node.address} NodeHostname={node.hostname} CPUs=4 RealMemory=1000"
                for node in nodes
            ),
            "PartitionName=dev Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
            *extra,
            "include accounting.conf",
            "",
        ]
    )
