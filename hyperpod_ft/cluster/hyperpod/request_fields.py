"""Maps parts of a `CreateCluster` request (`requests.create_cluster`) to keys of the cluster file."""

import re

from hyperpod_ft.cluster.config import ClusterConfig
from hyperpod_ft.cluster.sections import InstanceGroup

_CLUSTER = (
    ("ClusterName", "name"),
    ("VpcConfig.Subnets", "existing.subnet_id"),
    ("VpcConfig.SecurityGroupIds", "existing.security_group_ids"),
    ("NodeRecovery", "node_recovery"),
    ("NodeProvisioningMode", "continuous_provisioning"),
    ("Orchestrator.Slurm.AccountingDatabase.Endpoint", "accounting_database.endpoint"),
    ("Orchestrator.Slurm.AccountingDatabase.Name", "accounting_database.name"),
    ("Orchestrator.Slurm.AccountingDatabase.SecretArn", "accounting_database.secret_arn"),
    ("Orchestrator", "provisioning"),
    ("InstanceGroups", "workers"),
)
_OF_ALL_GROUPS = (
    ("ExecutionRole", "existing.execution_role_arn"),
    ("LifeCycleConfig", "existing.bucket"),
    ("InstanceStorageConfigs[0].EbsVolumeConfig.VolumeKmsKeyId", "kms_keys.volumes"),
    ("InstanceStorageConfigs[2]", "kms_keys.volumes"),
    ("InstanceStorageConfigs[1].FsxLustreConfig.MountPath", "fsx.mount_path"),
    ("InstanceStorageConfigs[1]", "existing.fsx_id"),
)
_OF_ONE_GROUP = (
    ("InstanceGroupName", "name"),
    ("InstanceType", "instance_type"),
    ("InstanceCount", "count"),
    ("MinInstanceCount", "min_count"),
    ("ThreadsPerCore", "threads_per_core"),
    ("InstanceStorageConfigs", "volume_gb"),
    ("SlurmConfig", "partition"),
    ("ImageId", "image_id"),
    ("AutoPatchConfig", "auto_patch"),
    ("OnStartDeepHealthChecks", "deep_health_checks"),
    ("TrainingPlanArn", "training_plan_arn"),
)


def group_keys(config: ClusterConfig) -> list[str]:
    """The cluster file's key of each of `config.groups`: controller, login, workers.0, ..."""
    workers = [f"workers.{index}" for index in range(len(config.workers))]
    return ["controller", *(["login"] if config.login else []), *workers]


def keyed_groups(config: ClusterConfig) -> list[tuple[str, InstanceGroup]]:
    """Every instance group with its key in the cluster file."""
    return list(zip(group_keys(config), config.groups, strict=True))


def cluster_file_key(config: ClusterConfig, path: str) -> str:
    """`InstanceGroups[1].InstanceType` -> `workers.0.instance_type`; the path itself if no key sets it."""
    if tag := re.match(r"Tags\[(\d+)\]", path):
        return f"tags.{sorted(config.tags)[int(tag[1])]}"
    if not (group := re.match(r"InstanceGroups\[(\d+)\]\.?(.*)", path)):
        return _look_up(_CLUSTER, path) or path
    return key_of_group(group_keys(config)[int(group[1])], group[2]) or path


def key_of_group(group: str, path: str) -> str:
    """The key that sets a part of a group's request. `group`: the group's key, `workers.0`; `path`: `InstanceType`."""
    own = _look_up(_OF_ONE_GROUP, path)
    return _look_up(_OF_ALL_GROUPS, path) or (f"{group}.{own}" if own else "")


def _look_up(table: tuple[tuple[str, str], ...], path: str) -> str:
    return next((key for start, key in table if path.startswith(start)), "")
