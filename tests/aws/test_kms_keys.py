"""Keys of the customer, from the cluster file to file system, bucket, volumes and the permissions to use them."""

import pytest

from hyperpod_ft.cluster.hyperpod import requests
from hyperpod_ft.cluster.stack.stack import deploy
from hyperpod_ft.cluster.validation.validate import validate_offline
from tests.aws.account_place import ROLE_ACTIONS, Place, allow, allowed, check, clients, config, of, only
from tests.aws.conftest import Aws, kit_session


def key(aws: Aws, **more: str) -> str:
    made: str = clients(aws)("kms").create_key(**more)["KeyMetadata"]["Arn"]
    return made


def test_file_system_bucket_and_volumes_have_them_and_the_role_may_use_them(aws: Aws) -> None:
    volumes, fsx, bucket = key(aws), key(aws), key(aws)
    file = config(kms_keys={"volumes": volumes, "fsx": fsx, "bucket": bucket})
    assert validate_offline(file).findings == ()
    assert check(aws, kms_keys=file.kms_keys.model_dump()).findings == ()
    resources = deploy(kit_session(), file)

    (volume,) = aws.client("fsx").describe_file_systems()["FileSystems"]
    assert volume["KmsKeyId"] == fsx
    answer = aws.client("s3").get_bucket_encryption(Bucket=resources.bucket)
    (rule,) = answer["ServerSideEncryptionConfiguration"]["Rules"]
    default = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": bucket}
    assert (rule["ApplyServerSideEncryptionByDefault"], rule["BucketKeyEnabled"]) == (default, True)

    for_objects, for_volumes = {"kms:Decrypt", "kms:GenerateDataKey"}, {"kms:CreateGrant", "kms:DescribeKey"}
    for arn, actions in ((volumes, for_volumes), (fsx, set()), (bucket, for_objects)):
        assert {each for each in for_objects | for_volumes if allowed(aws, resources.role_arn, each, arn)} == actions

    aws.client("s3").put_object(Bucket=resources.bucket, Key="lifecycle/1/provision.sh", Body=b"#!/bin/bash\n")
    request = requests.create_cluster(file, resources, f"s3://{resources.bucket}/lifecycle/1")
    aws.client("sagemaker").create_cluster(**request)
    described = aws.client("sagemaker").describe_cluster(ClusterName="demo")["InstanceGroups"]
    assert all(volumes in str(group["InstanceStorageConfigs"]) for group in described)


def test_without_keys_aws_encrypts_with_its_own(aws: Aws) -> None:
    resources = deploy(kit_session(), config())
    answer = aws.client("s3").get_bucket_encryption(Bucket=resources.bucket)
    (rule,) = answer["ServerSideEncryptionConfiguration"]["Rules"]
    assert rule["ApplyServerSideEncryptionByDefault"] == {"SSEAlgorithm": "AES256"}


def test_the_key_of_a_file_system_does_not_change(aws: Aws) -> None:
    """CloudFormation would replace the file system by an empty one."""
    mine, other = key(aws), key(aws)
    parameters = config(kms_keys={"fsx": mine})
    deploy(kit_session(), parameters)
    assert check(aws, kms_keys={"fsx": mine}).findings == ()
    for changed in ({}, {"fsx": other}):
        finding = only(check(aws, kms_keys=changed).findings)
        assert (finding.verdict, finding.name) == ("error", "kms_keys.fsx")
        assert f"set {mine}, or choose another name" in finding.remedy


def test_keys_that_nothing_can_use(aws: Aws) -> None:
    kms = clients(aws)("kms")
    there, off, pair = key(aws), key(aws), key(aws, KeySpec="RSA_2048", KeyUsage="ENCRYPT_DECRYPT")
    kms.disable_key(KeyId=off.rpartition("/")[2])  # moto takes no ARN here
    missing = there.rpartition("/")[0] + "/00000000-0000-4000-8000-000000000000"
    for arn, problem in ((missing, "no key arn"), (off, "is Disabled"), (pair, "is a key of kind RSA_2048")):
        finding = only(check(aws, kms_keys={"bucket": arn, "fsx": there}).findings)
        assert (finding.verdict, finding.name) == ("error", "kms_keys.bucket")
        assert problem in finding.found


@pytest.mark.parametrize("allowed", [False, True])
def test_an_existing_role_must_be_able_to_use_the_key_of_the_volumes(place: Place, allowed: bool) -> None:
    if allowed:
        allow(clients(place.aws)("iam"), "hyperpod", *ROLE_ACTIONS, "kms:CreateGrant", "kms:DescribeKey")
    findings = of(place.check(kms_keys={"volumes": key(place.aws)}), "existing.execution_role_arn")
    assert ["may not kms:CreateGrant, kms:DescribeKey" in finding.found for finding in findings] == [True][allowed:]
