"""The cluster file: values that no account allows, and the requests to HyperPod made from the others."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hyperpod_ft.cluster import config as cluster_config
from hyperpod_ft.cluster import sections
from hyperpod_ft.cluster.config import ClusterConfig
from hyperpod_ft.cluster.hyperpod import requests
from hyperpod_ft.cluster.hyperpod.instance_groups import group_specification
from hyperpod_ft.cluster.stack.resources import ClusterResources
from hyperpod_ft.config import run_file
from hyperpod_ft.errors import ConfigError
from hyperpod_ft.shipped import shipped

RESOURCES = ClusterResources(
    subnet_id="subnet-0123456789abcdef0",
    security_group_ids=("sg-0123456789abcdef0",),
    role_arn="arn:aws:iam::123456789012:role/hyperpod",
    bucket="sagemaker-hyperpod-1",
    fsx_dns_name="fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com",
    fsx_mount_name="4owupbev",
)
TRN1 = {"name": "trainium", "instance_type": "ml.trn1.32xlarge"}
KEY = "arn:aws:kms:us-west-2:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
EXISTING = {
    "subnet_id": RESOURCES.subnet_id,
    "security_group_ids": list(RESOURCES.security_group_ids),
    "execution_role_arn": RESOURCES.role_arn,
    "bucket": RESOURCES.bucket,
    "fsx_id": "fs-0123456789abcdef0",
}
URI = "s3://sagemaker-hyperpod-1/lifecycle/ml/0123"

DATABASE = {
    "endpoint": "jobs.c1.us-west-2.rds.amazonaws.com",
    "secret_arn": "arn:aws:secretsmanager:us-west-2:123456789012:secret:jobs-AbCdEf",
}
RDS = {"accounting": "rds", "accounting_database": DATABASE}


def values(**changes: Any) -> dict[str, Any]:
    return {
        "name": "ml",
        "region": "us-west-2",
        "availability_zone_id": "usw2-az4",
        "workers": [{"name": "workers-1", "instance_type": "ml.trn1.32xlarge", "count": 2}],
        **changes,
    }


def load(tmp_path: Path, **changes: Any) -> ClusterConfig:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(values(**changes)))
    return cluster_config.load(path)


WORKER = {"name": "w", "instance_type": "ml.trn1.32xlarge", "count": 2}


def refused(tmp_path: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, **changes)
    return str(raised.value)


def test_the_packaged_file_is_the_flagships_cluster() -> None:
    config = cluster_config.load(shipped("templates") / "cluster" / "cluster.yaml")
    assert config.controller.instance_type == "ml.c5.xlarge"
    assert [(group.instance_type, group.count) for group in config.workers] == [("ml.trn1.32xlarge", 1)]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"name": "ml--"}, "name: must be "),
        ({"region": "us-west-2a"}, "region: must be an AWS region"),
        ({"availability_zone_id": "us-west-2a"}, "availability_zone_id: must be the id of an availability zone"),
        ({"controller": {"count": 2}}, "controller.count: must be 1"),
        ({"workers": []}, "workers: "),
        ({"workers": [{"name": "w", "instance_type": "trn1.32xlarge"}]}, "workers.0.instance_type: must be"),
        ({"workers": [{"name": "w", "instance_typ": "ml.trn1.32xlarge"}]}, "did you mean instance_type?"),
        (
            {"workers": [{"name": "controller-machine", "instance_type": "ml.trn1.32xlarge"}]},
            "used twice: controller-machine",
        ),
        ({"fsx": {"size_gib": 3000}}, "fsx.size_gib: must be 1200 or a multiple of 2400 (FSx for Lustre); set 4800"),
        ({"fsx": {"mount_path": "fsx"}}, "fsx.mount_path: must be an absolute path"),
        ({"users": [{"name": "a", "uid": 2001}, {"name": "a", "uid": 2002}]}, "user names used twice: a"),
        ({"users": [{"name": "a", "uid": 2001}, {"name": "b", "uid": 2001}]}, "uid used twice: 2001"),
        ({"users": [{"name": "ubuntu", "uid": 2001}]}, "users.0.name: "),
        ({"users": [{"name": "a; rm -rf /", "uid": 2001}]}, "a Linux user name"),
        ({"users": [{"name": "a", "uid": 1000}]}, "users.0.uid: "),
        (
            {"users": [{"name": "a", "uid": 2001, "public_keys": ["-----BEGIN OPENSSH PRIVATE KEY-----"]}]},
            "users.0.public_keys.0: must be one line with an ssh public key",
        ),
        (
            {"users": [{"name": "a", "uid": 2001, "public_keys": ["command=x ssh-rsa AA"]}]},
            "users.0.public_keys.0: must",
        ),
        (
            {"users": [{"name": "a", "uid": 2001, "public_keys": ["ssh-ed25519 AAAA a@laptop"]}]},
            "users.0.public_keys.0: the data is not a ssh-ed25519 key",
        ),
        ({"kms_keys": {"fsx": "alias/mine"}}, "kms_keys.fsx: must be the ARN of a KMS key, not of an alias"),
        ({"kms_keys": {"bucket": KEY.replace("us-west-2", "us-east-1")}}, "kms_keys.bucket: the key is in us-east-1"),
        ({"kms_keys": {"volumes": KEY}, "continuous_provisioning": False}, "kms_keys.volumes: HyperPod needs"),
        ({"kms_keys": {"volumes": KEY}, "provisioning": "legacy"}, "kms_keys.volumes: HyperPod needs"),
        ({"kms_keys": {"fsx": KEY}, "existing": EXISTING}, "kms_keys: with `existing` only volumes"),
        ({"accounting": True}, "accounting: "),
        ({"accounting": "rds"}, "accounting: rds and the section accounting_database go together"),
        ({"accounting_database": DATABASE}, "accounting: rds and the section accounting_database go together"),
        ({**RDS, "continuous_provisioning": False}, "accounting: rds needs"),
        ({"workers": [{**WORKER, "min_count": 3}]}, "min_count: is 3, more than count: 2"),
        ({"workers": [{**WORKER, "min_count": 1}], "continuous_provisioning": False}, "min_count needs continuous_"),
        ({**RDS, "provisioning": "legacy"}, "accounting: rds needs"),
        ({**RDS, "region": "us-east-1"}, "accounting_database.secret_arn: not in region us-east-1"),
        ({**RDS, "accounting_database": {**DATABASE, "endpoint": "db:3306"}}, "accounting_database.endpoint: must be"),
        ({"tags": {"aws:x": "1"}}, "tags: aws:x"),
        ({"workers": [{**TRN1, "partition": "dev"}]}, "workers.0.partition: HyperPod puts all nodes into dev"),
        (
            {"workers": [TRN1, {"name": "cpu", "instance_type": "ml.m5.4xlarge", "partition": "trn1"}]},
            "workers.1.partition: trn1 already has nodes of type ml.trn1.32xlarge, and cpu has ml.m5.4xlarge",
        ),
        (
            {"workers": [{"name": size, "instance_type": f"ml.trn2.{size}"} for size in ("3xlarge", "48xlarge")]},
            "workers.1.partition: trn2 already has",
        ),
    ],
)
def test_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    text = refused(tmp_path, **changes)
    assert problem in text
    assert str(tmp_path / "cluster.yaml") in text


def test_with_api_each_group_has_its_role_and_storage(tmp_path: Path) -> None:
    config = load(tmp_path, login={"count": 2}, tags={"team": "a"})
    request = requests.create_cluster(config, RESOURCES, URI)
    groups = {group["InstanceGroupName"]: group for group in request["InstanceGroups"]}
    assert groups["controller-machine"]["SlurmConfig"] == {"NodeType": "Controller"}
    assert groups["login-group"]["SlurmConfig"] == {"NodeType": "Login"}
    assert groups["workers-1"]["SlurmConfig"] == {"NodeType": "Compute", "PartitionNames": ["trn1"]}
    assert all(
        group["LifeCycleConfig"] == {"SourceS3Uri": URI, "OnInitComplete": "provision.sh"} for group in groups.values()
    )
    lustre = {"DnsName": RESOURCES.fsx_dns_name, "MountName": "4owupbev", "MountPath": "/fsx"}
    assert all({"FsxLustreConfig": lustre} in group["InstanceStorageConfigs"] for group in groups.values())
    assert request["Orchestrator"] == {"Slurm": {"SlurmConfigStrategy": "Managed"}}
    assert request["NodeProvisioningMode"] == "Continuous"
    assert request["Tags"] == [{"Key": "team", "Value": "a"}]


def test_a_cpu_group_beside_the_workers_gets_no_training_jobs(tmp_path: Path) -> None:
    """A recipe's partition is that of the cluster file's groups of its type, and of no others."""
    cpu = {"name": "cpu", "instance_type": "ml.m5.4xlarge"}
    for path in shipped("recipes").glob("*.yaml"):
        recipe = run_file.load(path).cluster
        if recipe.partition is not None:
            trained_on = {"name": "workers", "instance_type": f"ml.{recipe.instance_type}"}
            request = requests.create_cluster(load(tmp_path, workers=[trained_on, cpu], login={}), RESOURCES, URI)
            partitions = {
                group["InstanceGroupName"]: group["SlurmConfig"].get("PartitionNames")
                for group in request["InstanceGroups"]
            }
            assert [name for name, names in partitions.items() if names == [recipe.partition]] == ["workers"], path
            assert partitions["cpu"] == ["m5"]


def test_volumes_have_the_cluster_files_key(tmp_path: Path) -> None:
    request = requests.create_cluster(load(tmp_path, kms_keys={"volumes": KEY}, existing=EXISTING), RESOURCES, URI)
    for group in request["InstanceGroups"]:
        own, fsx, root = group["InstanceStorageConfigs"]
        assert own == {"EbsVolumeConfig": {"VolumeSizeInGB": 500, "VolumeKmsKeyId": KEY}}
        assert root == {"EbsVolumeConfig": {"RootVolume": True, "VolumeKmsKeyId": KEY}}
        assert list(fsx) == ["FsxLustreConfig"]


def test_legacy_roles_are_in_provisioning_parameters(tmp_path: Path) -> None:
    config = load(tmp_path, provisioning="legacy", login={}, accounting="controller")
    request = requests.create_cluster(config, RESOURCES, URI)
    assert "Orchestrator" not in request
    assert "NodeProvisioningMode" not in request
    for group in request["InstanceGroups"]:
        assert "SlurmConfig" not in group
        assert group["LifeCycleConfig"]["OnCreate"] == "provision.sh"
    assert requests.provisioning_parameters(config, RESOURCES) == {
        "version": "1.0.0",
        "workload_manager": "slurm",
        "controller_group": "controller-machine",
        "login_group": "login-group",
        "worker_groups": [{"instance_group_name": "workers-1", "partition_name": "trn1"}],
        "fsx_dns_name": RESOURCES.fsx_dns_name,
        "fsx_mountname": "4owupbev",
    }


def test_an_accounting_database_of_ones_own_is_asked_for(tmp_path: Path) -> None:
    request = requests.create_cluster(load(tmp_path, **RDS), RESOURCES, URI)
    assert request["Orchestrator"]["Slurm"] == {
        "SlurmConfigStrategy": "Managed",
        "AccountingDatabase": {"Endpoint": DATABASE["endpoint"], "Port": 3306, "SecretArn": DATABASE["secret_arn"]},
    }
    named = load(tmp_path, **RDS | {"accounting_database": {**DATABASE, "name": "jobs"}})
    assert (
        requests.create_cluster(named, RESOURCES, URI)["Orchestrator"]["Slurm"]["AccountingDatabase"]["Name"] == "jobs"
    )


@pytest.mark.parametrize(
    ("changes", "installed"),
    [
        ({}, False),
        ({"provisioning": "legacy", "accounting": "controller"}, True),
        ({"provisioning": "legacy"}, False),
        (RDS, False),
    ],
)
def test_the_scripts_install_a_database_only_where_they_are_to(
    tmp_path: Path, changes: dict[str, Any], installed: bool
) -> None:
    assert requests.settings(load(tmp_path, **changes), RESOURCES)["accounting"] is installed


def test_nodes_get_their_groups_and_users(tmp_path: Path) -> None:
    users = [{"name": "alice", "uid": 2001, "public_keys": ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5QkJC alice@laptop"]}]
    settings = requests.settings(load(tmp_path, users=users), RESOURCES)
    assert settings["groups"] == {"controller-machine": "controller", "workers-1": "compute"}
    assert settings["users"] == [{"gid": 2001, **users[0]}]


def test_a_described_group_can_be_requested_again(tmp_path: Path) -> None:
    asked = requests.create_cluster(load(tmp_path), RESOURCES, URI)["InstanceGroups"][1]
    described = {key: value for key, value in asked.items() if key != "InstanceCount"}
    described |= {"CurrentCount": 1, "TargetCount": 2, "Status": "InService"}
    assert group_specification(described) == asked


def test_nodes_accept_what_the_cluster_file_accepts() -> None:
    """The scripts of the nodes are a separate program: a billed node must not fail on values accepted here."""
    from provision import settings

    assert settings._MOUNT_PATH.pattern == sections.MOUNT_PATH
    assert settings._USER.pattern == sections.LINUX_USER
    assert all(settings._PUBLIC_KEY.fullmatch(f"{kind} AAAA= me@laptop") for kind in sections.KINDS)


@pytest.mark.parametrize("path", ["/fsx/", "//fsx", "/.fsx", "/fsx/../x", "/", "fsx", "/fsx "])
def test_mount_paths_that_a_node_would_reject(tmp_path: Path, path: str) -> None:
    assert "fsx.mount_path" in refused(tmp_path, fsx={"mount_path": path})
