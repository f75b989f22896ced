"""A cluster file and its resources -> requests to HyperPod and settings of its nodes. Pure functions.

API-driven: each group has its Slurm role and its storage, HyperPod sets up Slurm, and the lifecycle scripts run as
`OnInitComplete`. Legacy: the scripts run as `OnCreate`, start Slurm themselves, and read the roles in
provisioning_parameters.json.
"""

from typing import Any

from hyperpod_ft.cluster.config import ClusterConfig
from hyperpod_ft.cluster.sections import Controller, InstanceGroup, Login, Workers
from hyperpod_ft.cluster.stack.resources import ClusterResources

ENTRY = "provision.sh"  # lifecycle/provision.sh
_NODE_TYPES: dict[type[InstanceGroup], str] = {Controller: "Controller", Login: "Login", Workers: "Compute"}


def create_cluster(config: ClusterConfig, resources: ClusterResources, lifecycle_uri: str) -> dict[str, Any]:
    """The request of `CreateCluster`. `lifecycle_uri` is the S3 folder that holds the lifecycle scripts."""
    request: dict[str, Any] = {
        "ClusterName": config.name,
        "InstanceGroups": [_group(config, group, resources, lifecycle_uri) for group in config.groups],
        "VpcConfig": {"SecurityGroupIds": list(resources.security_group_ids), "Subnets": [resources.subnet_id]},
        "NodeRecovery": config.node_recovery,
    }
    if config.provisioning == "api":
        request["Orchestrator"] = {"Slurm": _slurm(config)}
        if config.continuous_provisioning:
            request["NodeProvisioningMode"] = "Continuous"
    if config.tags:
        request["Tags"] = [{"Key": key, "Value": value} for key, value in sorted(config.tags.items())]
    return request


def _slurm(config: ClusterConfig) -> dict[str, Any]:
    slurm: dict[str, Any] = {"SlurmConfigStrategy": "Managed"}
    if database := config.accounting_database:
        slurm["AccountingDatabase"] = {
            "Endpoint": database.endpoint,
            "Port": database.port,
            "SecretArn": database.secret_arn,
            **({"Name": database.name} if database.name else {}),
        }
    return slurm


def _group(
    config: ClusterConfig, group: InstanceGroup, resources: ClusterResources, lifecycle_uri: str
) -> dict[str, Any]:
    api = config.provisioning == "api"
    key = {"VolumeKmsKeyId": config.kms_keys.volumes} if config.kms_keys.volumes else {}
    storage: list[dict[str, Any]] = [{"EbsVolumeConfig": {"VolumeSizeInGB": group.volume_gb, **key}}]
    if api:
        storage.append(
            {
                "FsxLustreConfig": {
                    "DnsName": resources.fsx_dns_name,
                    "MountName": resources.fsx_mount_name,
                    "MountPath": config.fsx.mount_path,
                }
            }
        )
    if key:
        storage.append({"EbsVolumeConfig": {"RootVolume": True, **key}})
    request: dict[str, Any] = {
        "InstanceGroupName": group.name,
        "InstanceType": group.instance_type,
        "InstanceCount": group.count,
        "LifeCycleConfig": {"SourceS3Uri": lifecycle_uri, "OnInitComplete" if api else "OnCreate": ENTRY},
        "ExecutionRole": resources.role_arn,
        "ThreadsPerCore": group.threads_per_core,
        "InstanceStorageConfigs": storage,
    }
    if api:
        request["SlurmConfig"] = {"NodeType": _NODE_TYPES[type(group)]}
    if group.image_id:
        request["ImageId"] = group.image_id
    if isinstance(group, Workers):
        if group.auto_patch:
            request["AutoPatchConfig"] = {"PatchingStrategy": group.auto_patch}
        if api:
            request["SlurmConfig"]["PartitionNames"] = [group.slurm_partition]
        if group.deep_health_checks:
            request["OnStartDeepHealthChecks"] = list(group.deep_health_checks)
        if group.min_count:
            request["MinInstanceCount"] = group.min_count
        if group.training_plan_arn:
            request["TrainingPlanArn"] = group.training_plan_arn
    return request


def provisioning_parameters(config: ClusterConfig, resources: ClusterResources) -> dict[str, Any]:
    """provisioning_parameters.json: the roles of the groups, for HyperPod's agent on the legacy path."""
    parameters: dict[str, Any] = {
        "version": "1.0.0",
        "workload_manager": "slurm",
        "controller_group": config.controller.name,
        "worker_groups": [
            {"instance_group_name": group.name, "partition_name": group.slurm_partition} for group in config.workers
        ],
        "fsx_dns_name": resources.fsx_dns_name,
        "fsx_mountname": resources.fsx_mount_name,
    }
    if config.login:
        parameters["login_group"] = config.login.name
    return parameters


def settings(config: ClusterConfig, resources: ClusterResources) -> dict[str, Any]:
    """settings.json: settings of the lifecycle scripts, in addition to HyperPod's own files on the node."""
    return {
        "version": 1,
        "provisioning": config.provisioning,
        "default_user": "ubuntu",
        "fsx": {
            "dns_name": resources.fsx_dns_name,
            "mount_name": resources.fsx_mount_name,
            "mount_path": config.fsx.mount_path,
        },
        "groups": {group.name: _NODE_TYPES[type(group)].lower() for group in config.groups},
        "users": [
            {"name": user.name, "uid": user.uid, "gid": user.group_id, "public_keys": list(user.public_keys)}
            for user in config.users
        ],
        "accounting": config.accounting == "controller",
    }
