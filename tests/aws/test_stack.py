"""The stack from creation to deletion, on the stand-in for AWS (server.py), and its template."""

import json
import re
from collections.abc import Callable
from typing import Any

import cfnlint.api
import pytest
from botocore.exceptions import ClientError

from hyperpod_ft.aws import stacks
from hyperpod_ft.cluster.stack import stack
from hyperpod_ft.cluster.stack.stack import Remaining, delete, deploy, remains
from hyperpod_ft.errors import UserError
from tests.aws.account_place import config
from tests.aws.conftest import ZONE_ID, Aws, kit_session
from tests.aws.world import ACCOUNT

HP = config(name="hp", tags={"team": "research"})


def statuses(aws: Aws) -> dict[str, str]:
    stacks = aws.client("cloudformation").describe_stacks()["Stacks"]
    return {found["StackName"]: found["StackStatus"] for found in stacks}


def outputs(aws: Aws, name: str = "hyperpod-hp") -> dict[str, str]:
    (found,) = aws.client("cloudformation").describe_stacks(StackName=name)["Stacks"]
    return {output["OutputKey"]: output["OutputValue"] for output in found["Outputs"]}


def nat_gateways(aws: Aws) -> list[str]:
    found = aws.client("ec2").describe_nat_gateways()["NatGateways"]
    return [gateway["NatGatewayId"] for gateway in found if gateway["State"] == "available"]


def test_a_stack_is_deployed(aws: Aws) -> None:
    seen: list[str] = []
    found = deploy(kit_session(), HP, seen.append)
    reported = outputs(aws)
    assert (reported["Region"], reported["AvailabilityZoneId"]) == (aws.region, ZONE_ID)
    assert found.fsx_dns_name == f"{reported['FsxId']}.fsx.{aws.region}.amazonaws.com"
    assert found.bucket.startswith("sagemaker-")
    assert seen[0] == "stack hyperpod-hp: the stack: CREATE_IN_PROGRESS: User Initiated"
    assert seen[-1] == "stack hyperpod-hp: the stack: CREATE_COMPLETE"
    assert len(set(seen)) == len(seen), "each event once"
    made = aws.client("cloudformation").list_stack_resources(StackName="hyperpod-hp")["StackResourceSummaries"]
    done = [f"stack hyperpod-hp: {one['LogicalResourceId']} ({one['ResourceType']}): CREATE_COMPLETE" for one in made]
    assert set(done) <= set(seen), "of each resource"
    filesystem = aws.client("fsx").describe_file_systems(FileSystemIds=[reported["FsxId"]])["FileSystems"][0]
    assert filesystem["LustreConfiguration"]["MountName"] == found.fsx_mount_name
    assert {"Key": "team", "Value": "research"} in filesystem["Tags"]


def test_its_network_is_what_hyperpod_and_efa_need(aws: Aws) -> None:
    found, ec2 = deploy(kit_session(), HP), aws.client("ec2")
    group = ec2.describe_security_groups(GroupIds=list(found.security_group_ids))["SecurityGroups"][0]

    def names_itself(rules: list[dict[str, Any]]) -> bool:
        pairs = [pair for rule in rules if rule["IpProtocol"] == "-1" for pair in rule["UserIdGroupPairs"]]
        return [pair["GroupId"] for pair in pairs] == list(found.security_group_ids)

    assert names_itself(group["IpPermissions"])
    assert names_itself(group["IpPermissionsEgress"])
    tables = ec2.describe_route_tables(Filters=[{"Name": "association.subnet-id", "Values": [found.subnet_id]}])
    routes = tables["RouteTables"][0]["Routes"]
    assert [r["NatGatewayId"] for r in routes if r.get("DestinationCidrBlock") == "0.0.0.0/0"] == nat_gateways(aws)
    endpoint = ec2.describe_vpc_endpoints()["VpcEndpoints"][0]
    assert endpoint["RouteTableIds"] == [tables["RouteTables"][0]["RouteTableId"]]
    subnets = ec2.describe_subnets(SubnetIds=[found.subnet_id, outputs(aws)["PublicSubnetId"]])["Subnets"]
    assert {subnet["AvailabilityZoneId"] for subnet in subnets} == {ZONE_ID}


@pytest.mark.parametrize("without", ["neither", "role", "bucket"])
def test_nodes_cannot_change_the_scripts_that_the_next_node_runs_as_root(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    """Any user of a node has the role's credentials. The denials of role and bucket hold each without the other."""
    if without == "bucket":
        text = re.sub(r" +- Sid: NodesOnlyReadTheScripts.*?\n\n", "\n", stack.template(), flags=re.DOTALL)
        assert text != stack.template()
        monkeypatch.setattr(stack, "template", lambda: text)
    found, mine = deploy(kit_session(), HP), aws.client("s3")
    script = {"Bucket": found.bucket, "Key": "lifecycle/c/0123/provision.sh"}
    mine.put_object(**script, Body=b"#!/bin/bash\n")
    if without == "role":
        anything = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
        name = found.role_arn.rpartition("/")[2]
        aws.client("iam").put_role_policy(RoleName=name, PolicyName="bucket", PolicyDocument=json.dumps(anything))
    node = aws.client_of_role(found.role_arn, "s3")
    assert node.get_object(**script)["Body"].read() == b"#!/bin/bash\n"
    data = {"Bucket": found.bucket, "Key": "checkpoints/1"}
    node.put_object(**data, Body=b"x")
    node.delete_object(**data)
    upload = mine.create_multipart_upload(**script)["UploadId"]
    changes: list[Callable[[], Any]] = [
        lambda: node.put_object(**script, Body=b"#!/bin/bash\nid >/fsx/rooted\n"),
        lambda: node.copy_object(**script, CopySource=script),
        lambda: node.create_multipart_upload(**script),
        lambda: node.abort_multipart_upload(**script, UploadId=upload),
        lambda: node.delete_object(**script),
        lambda: node.delete_objects(Bucket=found.bucket, Delete={"Objects": [{"Key": script["Key"]}]}),
        lambda: node.put_object(Bucket=found.bucket, Key="lifecycle/c/0123/json.py", Body=b""),
    ]
    for change in changes:
        with pytest.raises(ClientError, match="AccessDenied"):
            change()
    assert mine.get_object(**script)["Body"].read() == b"#!/bin/bash\n"


def test_the_role_is_for_sagemaker_in_this_account(aws: Aws) -> None:
    name = deploy(kit_session(), HP).role_arn.rpartition("/")[2]
    (trust,) = aws.client("iam").get_role(RoleName=name)["Role"]["AssumeRolePolicyDocument"]["Statement"]
    assert trust["Principal"] == {"Service": "sagemaker.amazonaws.com"}
    assert trust["Condition"] == {"StringEqualsIfExists": {"aws:SourceAccount": ACCOUNT}}


def test_a_file_system_grows_and_does_not_shrink(aws: Aws) -> None:
    first = deploy(kit_session(), HP)
    grown = config(name="hp", fsx={"size_gib": 2400}, tags={"team": "research"})
    assert deploy(kit_session(), grown) == first
    found = remains(kit_session(), "hyperpod-hp").filesystem
    assert found and found.gib == 2400
    (volume,) = aws.client("fsx").describe_file_systems()["FileSystems"]
    assert (volume["LustreConfiguration"]["PerUnitStorageThroughput"], volume["Lifecycle"]) == (250, "AVAILABLE")
    with pytest.raises(UserError, match=r"hp is UPDATE_ROLLBACK_COMPLETE: FileSystem .*at least 10 percent more"):
        deploy(kit_session(), HP)
    assert deploy(kit_session(), grown) == first


def test_a_deployment_that_fails_says_why_and_can_be_done_again(aws: Aws) -> None:
    aws.scenario(fail_resources={"AWS::EC2::NatGateway": "The maximum number of NAT gateways has been reached."})
    failed = r"hp is ROLLBACK_COMPLETE: Nat \(AWS::EC2::NatGateway\): The maximum .*`hyperpod-ft cluster delete"
    for _ in range(2):
        with pytest.raises(UserError, match=failed):
            deploy(kit_session(), HP)
    assert aws.client("fsx").describe_file_systems()["FileSystems"] == [], "a failed creation keeps no file system"
    assert aws.client("s3").list_buckets()["Buckets"] == []
    assert delete(kit_session(), "hyperpod-hp") == Remaining()
    aws.scenario(fail_resources={"AWS::EC2::NatGateway": ""})
    assert deploy(kit_session(), HP).fsx_dns_name


def test_what_a_failed_creation_leaves_goes_with_it(aws: Aws) -> None:
    reason = {"AWS::FSx::FileSystem": "Rate exceeded"}
    aws.scenario(fail_resources={"AWS::EC2::NatGateway": "no more"}, fail_deletions=reason)
    with pytest.raises(UserError, match="hp is ROLLBACK_FAILED: Nat"):
        deploy(kit_session(), HP)
    assert len(aws.client("fsx").describe_file_systems()["FileSystems"]) == 1
    assert delete(kit_session(), "hyperpod-hp") == Remaining()
    assert aws.client("fsx").describe_file_systems()["FileSystems"] == []
    assert statuses(aws) == {}


def test_deleting_keeps_the_data_and_nothing_else_that_costs_money(aws: Aws) -> None:
    first = deploy(kit_session(), HP)
    aws.client("s3").put_object(Bucket=first.bucket, Key="checkpoints/1", Body=b"x" * 1000)
    left = remains(kit_session(), "hyperpod-hp")
    assert (left.nat_gateway_id, left.elastic_ip) != ("", "")
    kept = delete(kit_session(), "hyperpod-hp")
    assert (kept.nat_gateway_id, kept.elastic_ip) == ("", "")
    assert nat_gateways(aws) == []
    assert aws.client("ec2").describe_addresses()["Addresses"] == []
    assert kept.filesystem
    assert first.fsx_dns_name.startswith(f"{kept.filesystem.id}.")
    assert kept.bucket
    assert (kept.bucket.objects, kept.bucket.bytes) == (1, 1000)
    assert delete(kit_session(), "hyperpod-hp") == kept, "twice is as once"
    assert deploy(kit_session(), HP) == first, "the same file system, bucket and network again"
    assert len(nat_gateways(aws)) == 1


def test_a_state_from_before_the_request_is_not_believed(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    deploy(kit_session(), HP)
    aws.scenario(seconds={"stack.resource": 0.05})
    describe, before = stacks.describe, stacks.describe(aws.client("cloudformation"), "hyperpod-hp")
    stale = [before] * 3  # the first is true: nothing has been requested yet
    monkeypatch.setattr(stacks, "describe", lambda *a: stale.pop() if stale else describe(*a))
    assert delete(kit_session(), "hyperpod-hp").nat_gateway_id == ""


def test_deleting_with_data_leaves_nothing(aws: Aws) -> None:
    first, s3 = deploy(kit_session(), HP), aws.client("s3")
    s3.put_bucket_versioning(Bucket=first.bucket, VersioningConfiguration={"Status": "Enabled"})
    for body in (b"old", b"new"):
        s3.put_object(Bucket=first.bucket, Key="a", Body=body)
    s3.delete_object(Bucket=first.bucket, Key="a")
    assert delete(kit_session(), "hyperpod-hp", delete_data=True) == Remaining()
    assert statuses(aws) == {}
    assert aws.client("fsx").describe_file_systems()["FileSystems"] == []
    assert s3.list_buckets()["Buckets"] == []
    assert [vpc for vpc in aws.client("ec2").describe_vpcs()["Vpcs"] if not vpc["IsDefault"]] == []
    assert aws.client("iam").list_roles()["Roles"] == []
    assert delete(kit_session(), "hyperpod-hp", delete_data=True) == Remaining(), "no stack is success"


def test_deleting_with_data_continues_after_an_interruption(aws: Aws) -> None:
    deploy(kit_session(), HP)
    aws.scenario(errors=[{"service": "cloudformation", "operation": "DeleteStack", "code": "AccessDenied"}])
    with pytest.raises(UserError, match="access denied to DeleteStack"):
        delete(kit_session(), "hyperpod-hp", delete_data=True)
    assert remains(kit_session(), "hyperpod-hp").filesystem is None
    assert delete(kit_session(), "hyperpod-hp", delete_data=True) == Remaining()
    assert statuses(aws) == {}


def test_a_stack_deleted_outside_the_kit_keeps_its_data_and_its_network(aws: Aws) -> None:
    """Why `delete` updates: AWS cannot delete the network of a file system that must be kept."""
    deploy(kit_session(), HP)
    stack_id = aws.client("cloudformation").describe_stacks(StackName="hyperpod-hp")["Stacks"][0]["StackId"]
    before = stacks.last_event(aws.client("cloudformation"), stack_id)
    aws.client("cloudformation").delete_stack(StackName="hyperpod-hp")
    status = stacks.settle(aws.client("cloudformation"), stack_id, lambda _: None, after=before)
    assert status == "DELETE_FAILED"
    with pytest.raises(UserError, match=r"DELETE_FAILED: .*(has dependencies|dependent object)"):
        deploy(kit_session(), HP)
    assert len(aws.client("fsx").describe_file_systems()["FileSystems"]) == 1
    assert delete(kit_session(), "hyperpod-hp", delete_data=True) == Remaining()
    assert aws.client("fsx").describe_file_systems()["FileSystems"] == []
    assert statuses(aws) == {}


def test_two_stacks_share_an_account(aws: Aws) -> None:
    first = deploy(kit_session(), HP)
    second = deploy(kit_session(), config(name="hp-2"))
    assert [name for name, value in vars(first).items() if vars(second)[name] == value] == []
    delete(kit_session(), "hyperpod-hp", delete_data=True)
    assert deploy(kit_session(), config(name="hp-2")) == second


def test_a_stack_of_another_kind_is_refused(aws: Aws) -> None:
    other = json.dumps({"Resources": {"V": {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.9.0.0/16"}}}})
    aws.client("cloudformation").create_stack(StackName="hyperpod-hp", TemplateBody=other)
    with pytest.raises(UserError, match="stack hyperpod-hp was not created by this kit"):
        deploy(kit_session(), HP)
    with pytest.raises(UserError, match="stack hyperpod-hp was not created by this kit"):
        delete(kit_session(), "hyperpod-hp", delete_data=True)
    assert statuses(aws) == {"hyperpod-hp": "CREATE_COMPLETE"}


def test_cfn_lint_reports_nothing() -> None:
    regions = ["us-west-2", "us-east-1", "us-east-2", "ap-south-1", "eu-north-1"]
    assert cfnlint.api.lint(stack.template(), config=cfnlint.api.ManualArgs(regions=regions)) == []
    assert len(stack.template()) < 51200, "what CloudFormation takes in a request"
