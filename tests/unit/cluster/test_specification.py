"""The specification of an unchanged group in an `UpdateCluster` request, compared with botocore's model."""

from datetime import datetime, timezone
from typing import Any

import pytest

from hyperpod_ft.aws.checks.service_model import check_request, model
from hyperpod_ft.cluster.hyperpod.instance_groups import group_specification

ROLLING = {"RollingUpdatePolicy": {"MaximumBatchSize": {"Type": "INSTANCE_COUNT", "Value": 1}}}
DATE = datetime(2026, 12, 1, tzinfo=timezone.utc)
VPC = {"SecurityGroupIds": ["sg-0123456789abcdef0"], "Subnets": ["subnet-0123456789abcdef0"]}
DESCRIBED: dict[str, Any] = {
    "InstanceGroupName": "workers",
    "CurrentCount": 1,
    "TargetCount": 2,
    "MinCount": 1,
    "InstanceType": "ml.trn1.32xlarge",
    "LifeCycleConfig": {"SourceS3Uri": "s3://sagemaker-a/lifecycle", "OnInitComplete": "provision.sh"},
    "ExecutionRole": "arn:aws:iam::123456789012:role/hyperpod",
    "ThreadsPerCore": 1,
    "InstanceStorageConfigs": [{"EbsVolumeConfig": {"VolumeSizeInGB": 500}}],
    "OnStartDeepHealthChecks": ["InstanceStress"],
    "Status": "InService",
    "TrainingPlanArn": "arn:aws:sagemaker:us-west-2:123456789012:training-plan/p",
    "OverrideVpcConfig": VPC,
    "ScheduledUpdateConfig": {"ScheduleExpression": "cron(0 3 ? * SUN *)", "DeploymentConfig": ROLLING},
    "AutoPatchConfig": {
        "PatchingStrategy": "WhenIdle",
        "CurrentPatchSchedule": {"NextPatchDate": datetime(2026, 11, 1, tzinfo=timezone.utc)},
        "DesiredPatchSchedule": {"NextPatchDate": DATE},
        "DeploymentConfig": ROLLING,
        "IdleWaitWindowInSeconds": 7200,
    },
    "CurrentImageId": "ami-0123456789abcdef0",
    "DesiredImageId": "ami-0123456789abcdef0",
    "CurrentImageReleaseVersion": "1.2.3",
    "DesiredImageReleaseVersion": "1.2.4",
    "SlurmConfig": {"NodeType": "Compute", "PartitionNames": ["trn1"]},
    "CapacityRequirements": {"OnDemand": {}},
    "NetworkInterface": {"InterfaceType": "efa"},
    "SoftwareUpdateStatus": "Succeeded",
}


def test_nothing_that_a_group_has_is_left_out() -> None:
    """Every field of the model is there, but for the two halves of a choice and what Kubernetes alone has."""
    specification = group_specification(DESCRIBED)
    known = set(model("sagemaker").shape_for("ClusterInstanceGroupSpecification").members)
    assert known - specification.keys() == {"InstanceRequirements", "ImageId", "KubernetesConfig"}
    assert check_request("sagemaker", "UpdateCluster", {"ClusterName": "c", "InstanceGroups": [specification]}) == []
    assert (specification["InstanceCount"], specification["ImageReleaseVersion"]) == (2, "1.2.4")
    assert specification["AutoPatchConfig"] == {
        "PatchingStrategy": "WhenIdle",
        "PatchSchedule": {"NextPatchDate": DATE},
        "DeploymentConfig": ROLLING,
        "IdleWaitWindowInSeconds": 7200,
    }


def test_a_date_that_hyperpod_has_set_is_left_to_it() -> None:
    date = {"NextPatchDate": DATE}
    patching = {"PatchingStrategy": "WhenAllIdle", "CurrentPatchSchedule": date, "DesiredPatchSchedule": date}
    specification = group_specification({**DESCRIBED, "AutoPatchConfig": patching})
    assert specification["AutoPatchConfig"] == {"PatchingStrategy": "WhenAllIdle"}


def test_a_flexible_group_keeps_its_types() -> None:
    types = {"CurrentInstanceTypes": ["ml.g5.xlarge"], "DesiredInstanceTypes": ["ml.g6.xlarge", "ml.g5.xlarge"]}
    specification = group_specification({**DESCRIBED, "InstanceRequirements": types})
    assert specification["InstanceRequirements"] == {"InstanceTypes": ["ml.g6.xlarge", "ml.g5.xlarge"]}
    assert "InstanceType" not in specification


@pytest.mark.parametrize(
    ("images", "kept"),
    [
        ({"CurrentImageId": "ami-11111111"}, {"ImageId": "ami-11111111"}),
        ({"CurrentImageId": "ami-11111111", "CurrentImageReleaseVersion": "1.0.0"}, {"ImageReleaseVersion": "1.0.0"}),
        ({}, {}),
    ],
)
def test_a_group_keeps_its_image(images: dict[str, str], kept: dict[str, str]) -> None:
    """A custom image has no version of HyperPod's, and is kept by its id."""
    bare = {key: value for key, value in DESCRIBED.items() if "Image" not in key}
    specification = group_specification({**bare, **images})
    assert {key: value for key, value in specification.items() if key.startswith("Image")} == kept
