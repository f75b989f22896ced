"""The stand-in for AWS itself: what the other tests rely on when they claim that something works against AWS."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.aws.account_place import Place, cluster_request
from tests.aws.conftest import ROOT, Aws
from tests.waiting import wait_for


def request(place: Place, workers: int = 2, **more: Any) -> dict[str, Any]:
    groups = ("worker", workers, "ml.trn1.32xlarge"), ("worker-2", 1, "ml.trn2.48xlarge")
    return {**cluster_request(place, "c", "lifecycle", *groups), **more}


def status(sagemaker: Any) -> str:
    found: str = sagemaker.describe_cluster(ClusterName="c")["ClusterStatus"]
    return found


def running(sagemaker: Any, part: str = "") -> list[str]:
    pages = sagemaker.get_paginator("list_cluster_nodes").paginate(
        ClusterName="c", **({"InstanceGroupNameContains": part} if part else {}), PaginationConfig={"PageSize": 2}
    )
    nodes = [node for page in pages for node in page["ClusterNodeSummaries"]]
    return [node["InstanceId"] for node in nodes if node["InstanceStatus"]["Status"] == "Running"]


def refusal(call: Callable[..., Any], **arguments: Any) -> tuple[str, str]:
    with pytest.raises(ClientError) as error:
        call(**arguments)
    return error.value.response["Error"]["Code"], error.value.response["Error"]["Message"]


def test_a_cluster_from_creation_to_nothing(aws: Aws, place: Place) -> None:
    sagemaker = aws.client("sagemaker")
    aws.scenario(seconds={"node.launch": 0.3})
    arn = sagemaker.create_cluster(**request(place))["ClusterArn"]
    assert status(sagemaker) == "Creating"
    assert refusal(sagemaker.update_cluster, ClusterName="c", NodeRecovery="None")[0] == "ConflictException"
    assert refusal(sagemaker.create_cluster, **request(place))[0] == "ResourceInUse"
    wait_for(lambda: status(sagemaker) == "InService")
    assert len(running(sagemaker)) == 4
    assert len(running(sagemaker, "worker")) == 3, "a substring, as AWS's: worker-2 too"
    node = running(sagemaker)[0]
    logs, log_group = aws.client("logs"), f"/aws/sagemaker/Clusters/c/{arn[-12:]}"
    stream = f"LifecycleConfig/controller-machine/{node}"
    events = logs.get_log_events(logGroupName=log_group, logStreamName=stream)["events"]
    assert events[-1]["message"] == "Lifecycle scripts succeeded"
    target = f"sagemaker-cluster:{arn[-12:]}_controller-machine-{node}"
    assert aws.client("ssm").start_session(Target=target)["SessionId"]
    assert refusal(aws.client("ssm").start_session, Target=target + "0")[0] == "TargetNotConnected"
    sagemaker.delete_cluster(ClusterName="c")
    assert status(sagemaker) == "Deleting"
    wait_for(lambda: not sagemaker.list_clusters()["ClusterSummaries"])
    assert refusal(sagemaker.describe_cluster, ClusterName="c")[0] == "ResourceNotFound"


def test_continuous_provisioning_is_in_service_before_its_nodes(aws: Aws, place: Place) -> None:
    sagemaker = aws.client("sagemaker")
    aws.scenario(capacity={"ml.trn1.32xlarge": 1}, seconds={"capacity.wait": 0.02})
    sagemaker.create_cluster(**request(place, NodeProvisioningMode="Continuous"))
    wait_for(lambda: len(running(sagemaker)) == 3)
    worker = sagemaker.describe_cluster(ClusterName="c")["InstanceGroups"][1]
    assert (worker["CurrentCount"], worker["TargetCount"]) == (1, 2)
    assert all(node["InstanceId"] for node in sagemaker.list_cluster_nodes(ClusterName="c")["ClusterNodeSummaries"])
    nodes = sagemaker.list_cluster_nodes(ClusterName="c", IncludeNodeLogicalIds=True)["ClusterNodeSummaries"]
    (waiting,) = [node for node in nodes if not node["InstanceId"]]
    assert waiting["InstanceStatus"] == {"Status": "Pending", "Message": ""}
    *_, first = wait_for(
        lambda: [e for e in sagemaker.list_cluster_events(ClusterName="c")["Events"] if e["EventLevel"] == "Error"]
    )
    assert first["Description"] == "Failed to provision EC2 Instance in Cluster c and InstanceGroup worker"
    event = sagemaker.describe_cluster_event(ClusterName="c", EventId=first["EventId"])["EventDetails"]
    about = event["EventDetails"]["EventMetadata"]["Instance"]
    assert about["NodeLogicalId"] == waiting["NodeLogicalId"]
    assert "sufficient capacity" in about["FailureMessage"]
    aws.scenario(capacity={"ml.trn1.32xlarge": 9})
    wait_for(lambda: len(running(sagemaker)) == 4)
    added = sagemaker.batch_add_cluster_nodes(
        ClusterName="c", NodesToAdd=[{"InstanceGroupName": "worker", "IncrementTargetCountBy": 1}]
    )
    assert added["Successful"][0]["Status"] == "Pending"
    wait_for(lambda: len(running(sagemaker)) == 5)


def test_what_hyperpod_refuses(aws: Aws, place: Place) -> None:
    sagemaker, good = aws.client("sagemaker"), request(place)

    def refused(**group_changes: Any) -> str:
        changed = {
            **good,
            "InstanceGroups": [{**good["InstanceGroups"][0], **group_changes}, *good["InstanceGroups"][1:]],
        }
        code, message = refusal(sagemaker.create_cluster, **changed)
        assert code == "ValidationException"
        return message

    script = {"SourceS3Uri": "s3://sagemaker-mine/lifecycle", "OnCreate": "none.sh"}
    assert "'instanceGroups.1.member.instanceType'" in refused(InstanceType="ml.trn9.large")
    assert "regular expression" in refused(InstanceGroupName="a_b")
    assert "less than or equal to 2" in refused(ThreadsPerCore=3)
    assert "start with s3://sagemaker-" in refused(LifeCycleConfig={**script, "SourceS3Uri": "s3://other/x"})
    assert "none.sh: it does not exist" in refused(LifeCycleConfig=script)
    assert "exactly one Controller" in refused(SlurmConfig={"NodeType": "Login"})
    assert "must be unique" in refused(InstanceGroupName="worker")
    assert "does not exist" in refused(ExecutionRole=place.role + "x")
    aws.scenario(quotas={"ml.trn1.32xlarge for cluster usage": 1})
    assert refusal(sagemaker.create_cluster, **good)[0] == "ResourceLimitExceeded"


def test_it_ends_with_its_parent(aws: Aws) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT],
        cwd=ROOT,
        env={**aws.environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid, endpoint = parent.stdout.readline().split()
    port = int(endpoint.rpartition(":")[2])
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()

    def gone() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) != 0

    wait_for(gone)
    assert pid


_PARENT = """
import subprocess, sys, time
pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
server = subprocess.Popen([sys.executable, "-m", "tests.aws.server"], text=True, **pipes)
print(server.pid, server.stdout.readline().strip(), flush=True)
time.sleep(60)
"""


def test_no_test_can_reach_aws() -> None:
    with socket.socket() as client, pytest.raises(AssertionError, match="tried to connect"):
        client.connect(("192.0.2.1", 443))
