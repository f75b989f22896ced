"""cluster-config.json and provisioning_parameters.json written by hand; each check on wrong and on valid files."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("botocore")
from hyperpod_ft.aws.findings import Finding
from hyperpod_ft.aws.validation.handwritten import validate_handwritten


def only(findings: list[Finding] | tuple[Finding, ...]) -> Finding:
    (finding,) = findings
    assert finding.problem
    assert finding.fix
    return finding


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
        ("{", "cluster-config.json:1", "not valid JSON"),
        ("[]", "cluster-config.json", "not a JSON object"),
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
            "already used as controller_group",
        ),
        ({"worker_groups": []}, "warning", "provisioning_parameters.json", "no role for the group worker-group-1"),
        ({"workload_manager": "pbs"}, "error", "workload_manager", "set `slurm`"),
        ({"fsx_mountname": ""}, "error", "fsx_mountname", "is missing"),
        ({"fsx_dns_name": "fs-1"}, "error", "fsx_dns_name", "'fs-1'"),
        ({"fsx_mountname": "much-too-long"}, "error", "fsx_mountname", "'much-too-long'"),
        ({"fsx_mount_name": "x"}, "warning", "fsx_mount_name", "did you mean fsx_mountname?"),
    ],
)
def test_wrong_provisioning_parameters(tmp_path, changes, severity, place, said):
    """AWS's validate-config.py looks only at worker groups, and each result overwrites the one before."""
    found = [
        f for f in handwritten(tmp_path, CLUSTER, {**PARAMETERS, **changes}) if place in f.field and said in str(f)
    ]
    assert only(found).severity == severity


def test_missing_provisioning_parameters(tmp_path):
    parameters = {key: value for key, value in PARAMETERS.items() if key != "version"}
    assert "version" in only(handwritten(tmp_path, CLUSTER, parameters)).field
    assert "SlurmConfig" in only(handwritten(tmp_path, CLUSTER, None)).fix
    assert "SlurmConfig" in handwritten(tmp_path, api(controller="Controller", worker="Compute"))[0].problem
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
