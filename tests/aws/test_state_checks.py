"""What already exists in the account: a bucket, cluster or stack of this name."""

import json
from typing import Any

import pytest

from hyperpod_ft.cluster.stack.stack import deploy
from hyperpod_ft.cluster.validation.validate import validate_account
from hyperpod_ft.errors import UserError
from tests.aws.account_place import Place, check, clients, cluster, config, only, own_client
from tests.aws.conftest import Aws, kit_session
from tests.waiting import wait_for


def test_a_bucket_that_s3_sends_elsewhere(place: Place) -> None:
    """S3 answers 301 with the region in a header where the request went to another region; moto does not."""
    s3 = own_client(place.aws, "s3")

    def change(http_response: Any, parsed: dict[str, Any], **_: Any) -> None:
        http_response.status_code = 301
        parsed["Error"] = {"Code": "301", "Message": "Moved Permanently"}
        parsed["ResponseMetadata"]["HTTPHeaders"]["x-amz-bucket-region"] = "eu-west-1"

    s3.meta.events.register("after-call.s3.HeadBucket", change)
    checked = validate_account(place.config(), clients(place.aws, s3=s3))
    assert "is in eu-west-1" in only(checked.findings).found


def test_a_bucket_that_is_not_there_or_elsewhere(place: Place) -> None:
    assert "no bucket sagemaker-nowhere" in only(place.check({"bucket": "sagemaker-nowhere"}).findings).found
    place.aws.client("s3", "eu-west-1").create_bucket(
        Bucket="sagemaker-far", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )
    finding = only(place.check({"bucket": "sagemaker-far"}).findings)
    assert (finding.verdict, finding.name) == ("error", "existing.bucket")
    assert "in eu-west-1, the cluster in us-west-2" in finding.found


def test_a_cluster_of_that_name(place: Place) -> None:
    cluster(place, "demo", 2)
    finding = only(place.check().findings)
    assert (finding.verdict, finding.name) == ("warning", "name")
    assert "cluster demo already exists" in finding.found


def test_a_cluster_of_that_name_that_failed(place: Place) -> None:
    cluster(place, "demo", 2)
    sagemaker = own_client(place.aws, "sagemaker")

    def change(parsed: dict[str, Any], **_: Any) -> None:
        parsed["ClusterStatus"] = "Failed"

    sagemaker.meta.events.register("after-call.sagemaker.DescribeCluster", change)
    checked = validate_account(place.config(), clients(place.aws, sagemaker=sagemaker))
    assert only(checked.findings).verdict == "error"


STACK = config()


def test_a_stack_that_failed_is_reported_as_by_create(aws: Aws) -> None:
    """In the same words: advice about a broken stack must not cost the data that it holds."""
    aws.scenario(fail_resources={"AWS::EC2::NatGateway": "no more"})
    with pytest.raises(UserError) as refused:
        deploy(kit_session(), STACK)
    finding = only(check(aws).findings)
    assert (finding.verdict, finding.name) == ("error", "name")
    assert str(refused.value) == f"{finding.found}; {finding.remedy}"
    assert "is ROLLBACK_COMPLETE: Nat" in finding.found


def test_a_stack_of_that_name_that_is_not_the_kits(aws: Aws) -> None:
    template = {"Resources": {"Bucket": {"Type": "AWS::S3::Bucket", "Properties": {}}}}
    client = clients(aws)("cloudformation")
    client.create_stack(StackName="hyperpod-demo", TemplateBody=json.dumps(template))
    wait_for(lambda: "PROGRESS" not in client.describe_stacks(StackName="hyperpod-demo")["Stacks"][0]["StackStatus"])
    assert "was not created by this kit" in only(check(aws).findings).found
