"""A cluster file, and files written by hand, looked at without an account; each check with cause and without."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("botocore")

from hyperpod_ft.aws.findings import Finding
from hyperpod_ft.aws.hyperpod import lifecycle_files
from hyperpod_ft.aws.hyperpod.request_fields import cluster_file_key
from hyperpod_ft.aws.validation import addresses, offline_checks, regions
from hyperpod_ft.aws.validation.handwritten import validate_handwritten
from hyperpod_ft.aws.validation.validate import Checked, validate_offline
from hyperpod_ft.config.cluster_config import ClusterConfig
from hyperpod_ft.config.yaml_file import validate
from hyperpod_ft.errors import ConfigError
from hyperpod_ft.shipped import shipped

WORKERS = {"name": "worker-group-1", "instance_type": "ml.trn1.32xlarge", "count": 2}
PLAN = "arn:aws:sagemaker:us-west-2:123456789012:training-plan/plan-1"
EXISTING = {
    "subnet_id": "subnet-0123456789abcdef0",
    "security_group_ids": ["sg-0123456789abcdef0"],
    "execution_role_arn": "arn:aws:iam::123456789012:role/hyperpod",
    "bucket": "sagemaker-mine",
    "fsx_id": "fs-0123456789abcdef0",
}


def config(**changes: Any) -> ClusterConfig:
    values = {"name": "demo", "region": "us-west-2", "availability_zone_id": "usw2-az4", "workers": [WORKERS]}
    return ClusterConfig.model_validate({**values, **changes})


def workers(**changes: Any) -> dict[str, Any]:
    return {"workers": [{**WORKERS, **changes}]}


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lifecycle folder of the test's own."""
    folder = tmp_path / "lifecycle"
    folder.mkdir()
    (folder / "provision.sh").write_bytes(b"#!/bin/bash\ntrue\n")
    monkeypatch.setattr(lifecycle_files, "shipped", lambda name: tmp_path / name)
    return folder


def only(findings: list[Finding] | tuple[Finding, ...]) -> Finding:
    (finding,) = findings
    assert finding.problem
    assert finding.fix
    return finding


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"provisioning": "legacy", "accounting": True},
        {"login": {}, "tags": {"team": "größe"}, "existing": EXISTING, "continuous_provisioning": False},
        workers(
            training_plan_arn=PLAN, partition="p", instance_type="ml.p5.48xlarge", deep_health_checks=["InstanceStress"]
        ),
        {"region": "us-gov-west-1", "availability_zone_id": "usgw1-az1"},
    ],
)
def test_a_right_file_has_no_findings(changes):
    checked = validate_offline(config(**changes))
    assert checked.findings == ()
    assert not checked.has_errors
    assert "region" in checked.done


def test_results_add_up():
    both = validate_offline(config()) + Checked((), ("name",), ("quotas: because",), 2.0, "123456789012", "arn")
    assert both.done[-1] == "name"
    assert both.skipped == ("quotas: because",)
    assert both.seconds > 2
    assert (both.account, both.caller) == ("123456789012", "arn")


def test_it_needs_neither_network_nor_credentials(monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("connected"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    assert validate_offline(config()).findings == ()


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        (workers(instance_type="ml.trn1.32xlrage"), "workers.0.instance_type", "did you mean ml.trn1.32xlarge?"),
        ({"controller": {"instance_type": "ml.c9.xlarge"}}, "controller.instance_type", "did you mean ml.c"),
        ({"login": {"instance_type": "ml.zz.top"}}, "login.instance_type", "AWS knows"),
        (workers(training_plan_arn=PLAN + "p" * 2000), "workers.0.training_plan_arn", "at most 2048"),
        ({"tags": {"a*": "b"}}, "tags.a*", "does not match"),
        ({"tags": {"team": "x" * 257}}, "tags.team", "at most 256"),
        ({"region": "us-west-9", "availability_zone_id": "usw9-az1"}, "region", "did you mean us-west-"),
        ({"availability_zone_id": "use1-az4"}, "availability_zone_id", "usw2-az1"),
        ({"existing": {**EXISTING, "bucket": "mine"}}, "existing.bucket", "sagemaker-"),
        (workers(instance_type="ml.p5.48xlarge", count=1024), "workers", "10.0.0.0/17"),
        (
            workers(instance_type="ml.m5.xlarge", deep_health_checks=["InstanceStress"]),
            "workers.0.deep_health_checks",
            "no accelerators",
        ),
        (workers(training_plan_arn=PLAN.replace("us-west-2", "us-east-1")), "workers.0.training_plan_arn", "us-east-1"),
    ],
)
def test_what_is_wrong_is_told_with_the_key_of_the_cluster_file(changes, field, said):
    errors = [finding for finding in validate_offline(config(**changes)).findings if finding.field == field]
    assert errors, validate_offline(config(**changes)).findings
    assert all(finding.severity == "error" for finding in errors)
    assert any(said in str(finding) for finding in errors)
    assert validate_offline(config(**changes)).has_errors


def test_health_checks_on_trainium_are_a_warning():
    finding = only(validate_offline(config(**workers(deep_health_checks=["InstanceStress"]))).findings)
    assert (finding.severity, finding.field) == ("warning", "workers.0.deep_health_checks")


def test_a_region_of_another_form_is_a_warning_for_its_zone():
    finding = only(offline_checks.zone(config(region="us-iso-east-1", availability_zone_id="usie1-az1")))
    assert finding.severity == "warning"
    assert "could not check" in finding.problem


def test_the_zones_of_every_region_are_named_as_the_rule_says():
    """moto's table of zones was taken from AWS."""
    from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend

    compared = 0
    for region in regions.known("sagemaker"):
        zones = RegionsAndZonesBackend.zones.get(region, [])
        assert {zone.zone_id.rpartition("-az")[0] for zone in zones} <= {regions.zone_prefix(region)}
        compared += bool(zones)
    assert compared > 35
    assert regions.known("sagemaker")["us-west-2"] == "aws"


@pytest.mark.parametrize(
    ("region", "prefix"),
    [
        ("us-west-2", "usw2"),
        ("ap-southeast-1", "apse1"),
        ("us-gov-east-1", "usge1"),
        ("eu-central-1", "euc1"),
        ("cn-northwest-1", "cnnw1"),
        ("eusc-de-east-1", None),
        ("us-isob-east-1", None),
    ],
)
def test_zone_prefixes(region, prefix):
    assert regions.zone_prefix(region) == prefix


def test_addresses():
    # a Trainium1 node has 8 network cards, a P5 32; 5 addresses of a subnet are AWS's
    assert addresses.wanted(config()) == 1 + 2 * 8
    assert addresses.wanted(config(**workers(instance_type="ml.p5.48xlarge"))) == 1 + 2 * 32
    assert addresses.wanted(config(), {"ml.trn1.32xlarge": 2}) == 1 + 2 * 2
    assert addresses.usable("10.0.0.0/28") == 11
    assert validate_offline(config(**workers(instance_type="ml.p5.48xlarge", count=1023))).findings == ()


def test_the_private_subnet_is_the_templates():
    template = shipped("templates") / "cluster/stack.yaml"
    if not template.is_file():
        pytest.skip("no templates/cluster/stack.yaml")
    (cidr,) = re.findall(r"^  PrivateSubnet:\n(?:    .*\n)*?      CidrBlock: (\S+)", template.read_text(), re.M)
    assert cidr == offline_checks.PRIVATE_SUBNET


@pytest.mark.parametrize(
    ("text", "said"), [(b"#!/bin/bash\r\ntrue\r\n", "Windows line ends"), (b"true\n", "no #! line"), (b"", "missing")]
)
def test_lifecycle_scripts_that_bash_would_not_run(scripts, text, said):
    (scripts / "provision.sh").write_bytes(text)
    assert said in only(validate_offline(config()).findings).problem


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workers": [WORKERS, WORKERS]}, "worker-group-1; give each its own"),
        ({"login": {"name": "controller-machine"}}, "controller-machine; give each its own"),
        ({"controller": {"count": 2}}, "must be 1"),
        ({"fsx": {"size_gib": 3000}}, "set 4800"),
        ({"users": [{"name": "a", "uid": 2001}, {"name": "b", "uid": 2001}]}, "uid used twice: 2001"),
    ],
)
def test_what_no_account_can_hold_is_refused_before(changes, said):
    from hyperpod_ft.config.cluster_config import CLUSTER_FILE

    values = {
        "name": "demo",
        "region": "us-west-2",
        "availability_zone_id": "usw2-az4",
        "workers": [WORKERS],
        **changes,
    }
    with pytest.raises(ConfigError, match=said):
        validate(CLUSTER_FILE, values, "cluster.yaml")


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
        ("InstanceGroups[2].SlurmConfig.PartitionNames[0]", "workers.0.partition"),
        ("InstanceGroups[2].OnStartDeepHealthChecks[0]", "workers.0.deep_health_checks"),
        ("InstanceGroups[2].ThreadsPerCore", "workers.0.threads_per_core"),
        ("InstanceGroups[0].ExecutionRole", "existing.execution_role_arn"),
        ("InstanceGroups[0].LifeCycleConfig.SourceS3Uri", "existing.bucket"),
        ("InstanceGroups[0].Elsewhere", "InstanceGroups[0].Elsewhere"),
        ("VpcConfig.Subnets[0]", "existing.subnet_id"),
        ("VpcConfig.SecurityGroupIds[1]", "existing.security_group_ids"),
        ("Tags[1].Value", "tags.b"),
        ("Unheard", "Unheard"),
    ],
)
def test_the_keys_behind_a_request(path, key):
    assert cluster_file_key(config(login={}, tags={"b": "2", "a": "1"}), path) == key


# --- files written by hand

GROUP = {
    "InstanceGroupName": "worker-group-1",
    "InstanceType": "ml.trn1.32xlarge",
    "InstanceCount": 4,
    "LifeCycleConfig": {"SourceS3Uri": "s3://sagemaker-x/src", "OnCreate": "on_create.sh"},
    "ExecutionRole": "arn:aws:iam::123456789012:role/hyperpod",
}
CONTROLLER = {**GROUP, "InstanceGroupName": "controller-machine", "InstanceType": "ml.c5.xlarge", "InstanceCount": 1}
CLUSTER = {
    "ClusterName": "ml-cluster",
    "InstanceGroups": [CONTROLLER, GROUP],
    "VpcConfig": {"SecurityGroupIds": ["sg-0123456789abcdef0"], "Subnets": ["subnet-0123456789abcdef0"]},
}
PARAMETERS = {
    "version": "1.0.0",
    "workload_manager": "slurm",
    "controller_group": "controller-machine",
    "worker_groups": [{"instance_group_name": "worker-group-1", "partition_name": "dev"}],
    "fsx_dns_name": "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com",
    "fsx_mountname": "4owupbev",
}


def api(**kinds: str) -> dict[str, Any]:
    groups = [
        {**group, **({"SlurmConfig": {"NodeType": kinds[key]}} if key in kinds else {})}
        for key, group in (("controller", CONTROLLER), ("worker", GROUP))
    ]
    return {**CLUSTER, "InstanceGroups": groups, "Orchestrator": {"Slurm": {}}}


def handwritten(folder: Path, cluster: Any, parameters: Any | None = PARAMETERS) -> list[Finding]:
    (folder / "cluster-config.json").write_text(cluster if isinstance(cluster, str) else json.dumps(cluster))
    if parameters is None:
        return validate_handwritten(folder / "cluster-config.json")
    (folder / "provisioning_parameters.json").write_text(json.dumps(parameters))
    return validate_handwritten(folder / "cluster-config.json", folder / "provisioning_parameters.json")


def test_a_right_pair_passes_and_so_does_the_api_driven_form(tmp_path):
    assert handwritten(tmp_path, CLUSTER) == []
    assert handwritten(tmp_path, api(controller="Controller", worker="Compute"), None) == []


@pytest.mark.parametrize(
    ("cluster", "place", "said"),
    [
        ("{", "cluster-config.json:1", "is no JSON"),
        ("[]", "cluster-config.json", "no JSON object"),
        (
            {**CLUSTER, "InstanceGroups": [CONTROLLER, {**GROUP, "InstanceType": "ml.trn1.32x"}]},
            "InstanceGroups[1].InstanceType",
            "did you mean ml.trn1.32xlarge?",
        ),
        (
            {**CLUSTER, "InstanceGroups": [CONTROLLER, GROUP, GROUP]},
            "InstanceGroups[2].InstanceGroupName",
            "second group",
        ),
        (
            {
                **CLUSTER,
                "InstanceGroups": [
                    CONTROLLER,
                    {**GROUP, "LifeCycleConfig": {**GROUP["LifeCycleConfig"], "SourceS3Uri": "s3://mine/src"}},
                ],
            },
            "SourceS3Uri",
            "s3://sagemaker-",
        ),
        (
            {**CLUSTER, "InstanceGroups": [{**CONTROLLER, "InstanceCount": 2}, GROUP]},
            "controller_group",
            "has 2 instances",
        ),
    ],
)
def test_a_wrong_cluster_config(tmp_path, cluster, place, said):
    finding = only(handwritten(tmp_path, cluster))
    assert finding.severity == "error"
    assert place in finding.field
    assert said in str(finding)


@pytest.mark.parametrize(
    ("changes", "severity", "place", "said"),
    [
        (
            {"controller_group": "controller"},
            "error",
            "controller_group",
            "no instance group controller; did you mean controller-machine?",
        ),
        ({"login_group": "login-group"}, "error", "login_group", "no instance group login-group"),
        (
            {"worker_groups": [*PARAMETERS["worker_groups"], {"instance_group_name": "elsewhere"}]},
            "error",
            "worker_groups[1]",
            "no instance group elsewhere",
        ),
        (
            {"worker_groups": [*PARAMETERS["worker_groups"], {"instance_group_name": "controller-machine"}]},
            "error",
            "worker_groups[1]",
            "controller_group already",
        ),
        ({"worker_groups": []}, "warning", "provisioning_parameters.json", "no role for the group worker-group-1"),
        ({"workload_manager": "pbs"}, "error", "workload_manager", "set `slurm`"),
        ({"fsx_mountname": ""}, "error", "fsx_mountname", "is missing"),
        ({"fsx_dns_name": "fs-1"}, "error", "fsx_dns_name", "no FSx name"),
        ({"fsx_mountname": "much-too-long"}, "error", "fsx_mountname", "no mount name"),
        ({"fsx_mount_name": "x"}, "warning", "fsx_mount_name", "did you mean fsx_mountname?"),
    ],
)
def test_wrong_provisioning_parameters(tmp_path, changes, severity, place, said):
    """AWS's validate-config.py looks for worker groups alone, and lets the last of its results be overwritten."""
    found = [
        f for f in handwritten(tmp_path, CLUSTER, {**PARAMETERS, **changes}) if place in f.field and said in str(f)
    ]
    assert only(found).severity == severity


def test_missing_provisioning_parameters(tmp_path):
    parameters = {key: value for key, value in PARAMETERS.items() if key != "version"}
    assert "version" in only(handwritten(tmp_path, CLUSTER, parameters)).field
    assert "SlurmConfig" in only(handwritten(tmp_path, CLUSTER, None)).fix
    assert "writes this file itself" in handwritten(tmp_path, api(controller="Controller", worker="Compute"))[0].problem
    no_vpc = {key: value for key, value in CLUSTER.items() if key != "VpcConfig"}
    assert only(handwritten(tmp_path, no_vpc)).severity == "warning"


def test_provisioning_parameters_that_are_no_json(tmp_path):
    (tmp_path / "cluster-config.json").write_text(json.dumps(CLUSTER))
    finding = only(validate_handwritten(tmp_path / "cluster-config.json", tmp_path / "nowhere.json"))
    assert "cannot be read" in finding.problem


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ({"controller": "Controller"}, "SlurmConfig"),
        ({"controller": "Login", "worker": "Compute"}, "0 groups with NodeType Controller"),
        ({"controller": "Controller", "worker": "Controller"}, "2 groups with NodeType Controller"),
        ({"controller": "Controller", "worker": "Worker"}, "known: Controller, Login, Compute"),
    ],
)
def test_a_wrong_api_driven_form(tmp_path, kinds, said):
    assert any(said in str(finding) for finding in handwritten(tmp_path, api(**kinds), None))
