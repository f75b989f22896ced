"""What goes wrong around `hyperpod-ft cluster`, against the server that stands in for AWS (server.py)."""

import re
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from hyperpod_ft.aws.stacks import KitStack
from hyperpod_ft.cluster import config, maintenance
from hyperpod_ft.cluster import create as creation
from hyperpod_ft.cluster.access import ClusterAccess
from hyperpod_ft.cluster.hyperpod import api, events
from hyperpod_ft.cluster.hyperpod.instance_groups import group_specification
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import PrintLine
from tests.aws.kit import NAME, Kit
from tests.waiting import wait_for

DENIED = {"code": "AccessDeniedException", "message": "User: x is not authorized to perform: y:Z", "times": 99}


def made_by_others(kit: Kit, **changes: Any) -> dict[str, Any]:
    """Create a cluster of the same name from another file; returns its description."""
    kit.configure(name="other")
    kit.run("create")
    sagemaker = kit.aws.client("sagemaker")
    other = sagemaker.describe_cluster(ClusterName="other")
    copied = ("InstanceGroupName", "InstanceType", "LifeCycleConfig", "ExecutionRole")
    groups = [
        {"InstanceCount": group["TargetCount"], **{key: group[key] for key in copied}}
        for group in other["InstanceGroups"]
    ]
    sagemaker.create_cluster(ClusterName=NAME, InstanceGroups=groups, VpcConfig=other["VpcConfig"], **changes)
    kit.run("status", NAME)
    described: dict[str, Any] = sagemaker.describe_cluster(ClusterName=NAME)
    kit.configure()
    return described


def requested(described: dict[str, Any]) -> list[tuple[object, ...]]:
    """The groups, without how far they are: their nodes start meanwhile."""
    keys = ("InstanceGroupName", "TargetCount", "InstanceType", "LifeCycleConfig")
    return [tuple(group[key] for key in keys) for group in described["InstanceGroups"]]


def test_a_cluster_of_others_is_left_alone(kit: Kit) -> None:
    """It has this cluster file's name: nothing that costs money is created, and it gets neither scripts nor groups."""
    before = made_by_others(kit)
    assert "on other subnets" in kit.run("validate", status=1)
    assert "on other subnets" in kit.run("create", status=2)
    assert len(kit.aws.client("cloudformation").describe_stacks()["Stacks"]) == 1, "that of the other cluster"
    # validation only warns about what it could not check; as often as it asks
    kit.aws.scenario(errors=[{"service": "cloudformation", "operation": "DescribeStacks", **DENIED, "times": 2}])
    output = kit.run("create", status=2)
    assert "could not check name" in output
    assert "on other subnets" in output
    after = kit.aws.client("sagemaker").describe_cluster(ClusterName=NAME)
    assert requested(after) == requested(before)


def test_who_may_not_look_at_clusters_pays_for_no_stack(kit: Kit) -> None:
    kit.aws.scenario(errors=[{"service": "sagemaker", **DENIED}])
    assert "access denied" in kit.run("create", status=2)
    assert kit.aws.client("cloudformation").describe_stacks()["Stacks"] == []


def test_an_eks_cluster_is_not_changed(kit: Kit) -> None:
    """The kit would send UpdateCluster what it knows about a group, which is not what Kubernetes needs."""
    made_by_others(kit, Orchestrator={"Eks": {"ClusterArn": "arn:aws:eks:us-west-2:123456789012:cluster/mine"}})
    for command in (
        ["scale", NAME, "worker-group-1", "2"],
        ["update", NAME, "--yes"],
        ["node-recovery", NAME, "Automatic"],
    ):
        assert "Kubernetes" in kit.run(*command, status=2)
    assert not {"UpdateCluster", "UpdateClusterSoftware"} & {operation for _, operation in kit.aws.requests()}


def test_an_update_that_is_rolled_back_is_reported_at_once(kit: Kit) -> None:
    kit.configure(continuous_provisioning=False)
    kit.run("create")
    kit.aws.scenario(capacity={"ml.trn1.32xlarge": 1})
    reason = "rolled back: We currently do not have sufficient capacity"
    assert reason in kit.run("scale", NAME, "worker-group-1", "3", status=2)
    worker = {"instance_type": "ml.trn1.32xlarge"}
    kit.configure(
        continuous_provisioning=False, workers=[{"name": "worker-group-1", **worker}, {"name": "b", **worker}]
    )
    assert reason in kit.run("create", status=2)


def test_a_log_that_may_not_be_read_does_not_hide_the_failure(kit: Kit) -> None:
    kit.configure(continuous_provisioning=False)
    kit.aws.scenario(lifecycle={"worker-group-1": {"lines": [], "exit": 1}}, errors=[{"service": "logs", **DENIED}])
    *_, reason, last = kit.run("create", status=2).splitlines()
    assert "access denied" in reason
    assert "Lifecycle scripts did not run successfully" in last


def test_a_failed_cluster_that_is_still_shown_as_failed_is_deleted(kit: Kit) -> None:
    """For a moment, DescribeCluster may return the state before DeleteCluster."""
    kit.configure(continuous_provisioning=False)
    kit.aws.scenario(lifecycle={"worker-group-1": {"lines": [], "exit": 1}}, seconds={"cluster.delete.shown": 0.5})
    kit.run("create", status=2)
    assert "Remaining in" in kit.run("delete", "--confirm", NAME)


def test_a_bucket_of_thousands_is_deleted(kit: Kit) -> None:
    """More than a page of versions and delete markers, and an upload that was never completed."""
    kit.run("create")
    s3 = kit.aws.client("s3")
    bucket = s3.list_buckets()["Buckets"][0]["Name"]
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    keys = [{"Key": f"a b/é&<{number}"} for number in range(60)]
    for key in keys:
        s3.put_object(Bucket=bucket, Body=b"x", **key)
    for _ in range(20):  # each deletion adds a marker, and one request makes many
        s3.delete_objects(Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
    assert s3.list_object_versions(Bucket=bucket)["IsTruncated"]
    s3.create_multipart_upload(Bucket=bucket, Key="big")
    assert "Nothing that costs money" in kit.run("delete", "--confirm", NAME, "--delete-data")


@pytest.fixture
def access(kit: Kit) -> ClusterAccess:
    """For what only this process can do: stop at a line, or at a request."""
    return ClusterAccess.of(config.find(str(kit.file), None), None, print)


def create_with(access: ClusterAccess, report: PrintLine = print) -> None:
    assert access.config
    creation.create_missing(replace(access, report=report), access.config)


def delete(access: ClusterAccess, report: PrintLine = print, *, data: bool = False) -> None:
    maintenance.delete_cluster(replace(access, report=report), delete_data=data, timeout=1)


def test_create_continues_if_another_was_quicker(
    kit: Kit, access: ClusterAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its check and its request; also when botocore retries because an answer was lost."""
    create_with(access)
    describe, find = api.describe, KitStack.find
    clusters: list[None] = [None, None]
    stacks: list[None] = [None]
    monkeypatch.setattr(api, "describe", lambda *a: clusters.pop() if clusters else describe(*a))
    monkeypatch.setattr(KitStack, "find", lambda own: stacks.pop() if stacks else find(own))
    create_with(access)
    operations = [operation for _, operation in kit.aws.requests()]
    assert (operations.count("CreateStack"), operations.count("CreateCluster")) == (2, 2)


def assert_nothing_costs_money_but_the_data(kit: Kit) -> None:
    assert kit.aws.client("sagemaker").list_clusters()["ClusterSummaries"] == []
    gateways = kit.aws.client("ec2").describe_nat_gateways()["NatGateways"]
    assert [gateway for gateway in gateways if gateway["State"] == "available"] == []


def test_a_delete_during_create_leaves_no_cluster(kit: Kit, access: ClusterAccess) -> None:
    """`delete` ends after the stack was made and before the cluster is requested."""

    def during(line: str) -> None:
        if line.startswith("lifecycle: "):
            delete(access)

    with pytest.raises(UserError, match="was deleted meanwhile"):
        create_with(access, during)
    assert_nothing_costs_money_but_the_data(kit)


def test_a_delete_between_two_requests_leaves_no_cluster(kit: Kit, access: ClusterAccess) -> None:
    """`create` requests it again while the new role is not known everywhere."""
    refusal = {"code": "ValidationException", "message": "Could not assume role x"}
    kit.aws.scenario(errors=[{"service": "sagemaker", "operation": "CreateCluster", **refusal}])
    hooks = access.sagemaker.meta.events
    hooks.register("after-call.sagemaker.CreateCluster", lambda **_: delete(access))
    with pytest.raises(UserError, match="was deleted meanwhile"):
        create_with(access)
    assert_nothing_costs_money_but_the_data(kit)


@pytest.mark.parametrize("seconds", [60, 0], ids=["deleting", "gone"])
def test_no_cluster_is_created_without_its_file_system(kit: Kit, access: ClusterAccess, seconds: int) -> None:
    """`delete --delete-data` deletes it first, which takes minutes: until then the stack is as it was."""
    fsx = kit.aws.client("fsx")

    def during(line: str) -> None:
        if line.startswith("lifecycle: "):
            kit.aws.scenario(seconds={"fsx.delete": seconds})
            fsx.delete_file_system(FileSystemId=fsx.describe_file_systems()["FileSystems"][0]["FileSystemId"])
            if not seconds:
                wait_for(lambda: not fsx.describe_file_systems()["FileSystems"])

    with pytest.raises(UserError, match="was deleted meanwhile"):
        create_with(access, during)
    assert ("sagemaker", "CreateCluster") not in kit.aws.requests()


def request_again(sagemaker: Any) -> Callable[[], None]:
    """A request for the cluster as it is now, to be sent once it is gone."""
    described = sagemaker.describe_cluster(ClusterName=NAME)
    groups = [group_specification(group) for group in described["InstanceGroups"]]
    kept = {key: described[key] for key in ("Orchestrator", "VpcConfig")}
    return lambda: sagemaker.create_cluster(ClusterName=NAME, InstanceGroups=groups, **kept)


def test_a_create_during_delete_leaves_no_cluster(kit: Kit, access: ClusterAccess) -> None:
    """The cluster is requested after `delete` has looked for it, while the stack changes."""
    create_with(access)
    request = request_again(access.sagemaker)
    lines: list[str] = []

    def during(line: str) -> None:
        lines.append(line)
        if "Nat (AWS::EC2::NatGateway): DELETE_COMPLETE" in line:
            request()

    delete(access, during)
    assert lines.count(f"cluster {NAME}: no longer exists") == 2
    assert_nothing_costs_money_but_the_data(kit)


def test_a_create_during_delete_of_the_data_leaves_nothing(kit: Kit, access: ClusterAccess) -> None:
    """The new cluster keeps CloudFormation from deleting its subnet: the deletion fails, and is tried again."""
    create_with(access)
    requests, lines = [request_again(access.sagemaker)], []
    hooks = access.session.client("fsx").meta.events
    hooks.register("after-call.fsx.DeleteFileSystem", lambda **_: requests and requests.pop()())
    delete(access, lines.append, data=True)
    assert any("has been created meanwhile" in line for line in lines)
    assert lines.count(f"cluster {NAME}: no longer exists") == 2
    assert_nothing_costs_money_but_the_data(kit)
    assert kit.aws.client("cloudformation").describe_stacks()["Stacks"] == []


def test_a_stack_without_a_cluster_is_reported(kit: Kit) -> None:
    """`create` was stopped while it made the stack, or `delete` before it reached the stack."""
    kit.aws.scenario(errors=[{"service": "sagemaker", "operation": "CreateCluster", **DENIED, "times": 1}])
    kit.run("create", status=2)
    output = kit.run("status", status=2)
    assert "stack hyperpod-ml-cluster" in output
    assert "costs money" in output


def test_delete_says_where_it_looked_and_waits_for_a_cluster_that_changes(kit: Kit) -> None:
    """That nothing is left in one region says nothing about another. HyperPod refuses it while the cluster changes."""
    kit.run("create")
    assert "Nothing that costs money remains in us-east-1" in kit.run(
        "delete", NAME, "--confirm", NAME, "--region", "us-east-1"
    )
    refusal = {"service": "sagemaker", "operation": "DeleteCluster", "code": "ConflictException", "times": 2}
    kit.aws.scenario(errors=[refusal])
    output = kit.run("delete", "--confirm", NAME)
    assert "deleted once it is no longer InService" in output and "Remaining in" in output
    assert f"cluster delete {NAME} --region us-west-2 --delete-data" in output


def test_ctrl_c_says_how_to_go_on(kit: Kit) -> None:
    kit.aws.scenario(seconds={"fsx.create": 3600})
    process = kit.start("create")
    process.wait_for("CREATE_COMPLETE")
    process.send_signal(signal.SIGINT)
    *_, last = process.finish(130).splitlines()
    assert re.match(r"interrupted: .*`hyperpod-ft cluster delete`", last)


def test_create_after_a_delete_that_stopped_half_way(kit: Kit) -> None:
    """The stack still lists a file system that is gone: no node could mount it."""
    kit.run("create")
    kit.aws.scenario(errors=[{"service": "cloudformation", "operation": "DeleteStack", **DENIED}])
    kit.run("delete", "--confirm", NAME, "--delete-data", status=2)
    kit.aws.scenario(errors=[])
    output = kit.run("create", status=2)
    assert "its file system was deleted" in output
    assert "--delete-data" in output
    assert "requested" not in output


def test_validate_and_create_advise_the_same_about_a_stack_that_is_stuck(kit: Kit) -> None:
    """Deleting it by hand would leave its file system behind, in a network that AWS then cannot delete."""
    kit.run("create")
    kit.run("delete", "--confirm", NAME)
    kit.aws.scenario(fail_resources={"AWS::EC2::Route": "no"}, fail_deletions={"AWS::EC2::NatGateway": "no"})
    advice = f"aws cloudformation continue-update-rollback --stack-name hyperpod-{NAME}"
    assert advice in kit.run("create", status=2)
    assert advice in kit.run("validate", status=1)


def test_the_newest_log_is_found_before_cloudwatch_tells_when_it_was_written_to() -> None:
    """lastEventTimestamp: "updates on an eventual consistency basis; typically in less than an hour"."""
    session = boto3.Session("testing", "testing", region_name="us-west-2")
    client = session.client("logs")
    streams = [
        {"logStreamName": "LifecycleConfig/a/i-1", "creationTime": 1000, "lastEventTimestamp": 2000},
        {"logStreamName": "LifecycleConfig/a/i-2", "creationTime": 3000},
    ]
    cluster = api.HyperPodCluster(
        NAME, "arn:aws:sagemaker:us-west-2:123456789012:cluster/a", "Failed", "", (), (), False
    )
    with Stubber(client) as stubber:
        stubber.add_response("describe_log_streams", {"logStreams": streams})
        newest, _ = events.lifecycle_logs(client, cluster)
    assert newest.name == "LifecycleConfig/a/i-2"


def test_a_file_system_neither_moves_nor_shrinks(kit: Kit) -> None:
    kit.configure(fsx={"size_gib": 2400})
    kit.run("create")
    kit.configure(availability_zone_id="usw2-az1")
    output = kit.run("create", status=2)
    assert "availability_zone_id: the stack hyperpod-ml-cluster is in usw2-az4" in output
    assert "fsx.size_gib: the file system of hyperpod-ml-cluster has 2400 GiB and cannot shrink" in output
    assert [operation for _, operation in kit.aws.requests()].count("UpdateStack") == 0
