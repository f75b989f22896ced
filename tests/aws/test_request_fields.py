"""The cluster file's key behind each part of a request."""

import pytest

pytest.importorskip("botocore")
from hyperpod_ft.cluster.hyperpod.request_fields import cluster_file_key
from tests.aws.account_place import config


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("ClusterName", "name"),
        ("InstanceGroups", "workers"),
        ("InstanceGroups[0].InstanceType", "controller.instance_type"),
        ("InstanceGroups[1].InstanceCount", "login.count"),
        ("InstanceGroups[2].InstanceGroupName", "workers.0.name"),
        ("InstanceGroups[2].InstanceStorageConfigs[0].EbsVolumeConfig.VolumeSizeInGB", "workers.0.volume_gb"),
        ("InstanceGroups[2].InstanceStorageConfigs[1].FsxLustreConfig.MountPath", "fsx.mount_path"),
        ("InstanceGroups[2].InstanceStorageConfigs[1].FsxLustreConfig.DnsName", "existing.fsx_id"),
        ("InstanceGroups[2].InstanceStorageConfigs[0].EbsVolumeConfig.VolumeKmsKeyId", "kms_keys.volumes"),
        ("InstanceGroups[2].InstanceStorageConfigs[2].EbsVolumeConfig.VolumeKmsKeyId", "kms_keys.volumes"),
        ("InstanceGroups[2].SlurmConfig.PartitionNames[0]", "workers.0.partition"),
        ("InstanceGroups[2].OnStartDeepHealthChecks[0]", "workers.0.deep_health_checks"),
        ("InstanceGroups[2].MinInstanceCount", "workers.0.min_count"),
        ("InstanceGroups[2].ThreadsPerCore", "workers.0.threads_per_core"),
        ("InstanceGroups[0].ExecutionRole", "existing.execution_role_arn"),
        ("InstanceGroups[0].LifeCycleConfig.SourceS3Uri", "existing.bucket"),
        ("InstanceGroups[0].Elsewhere", "InstanceGroups[0].Elsewhere"),
        ("VpcConfig.Subnets[0]", "existing.subnet_id"),
        ("VpcConfig.SecurityGroupIds[1]", "existing.security_group_ids"),
        ("Tags[1].Value", "tags.b"),
        ("Orchestrator.Slurm.AccountingDatabase.SecretArn", "accounting_database.secret_arn"),
        ("Unheard", "Unheard"),
    ],
)
def test_the_keys_behind_a_request(path, key):
    assert cluster_file_key(config(login={}, tags={"b": "2", "a": "1"}), path) == key
