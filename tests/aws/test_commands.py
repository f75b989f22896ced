"""`hyperpod-ft cluster ...`, as users run it, against the server that stands in for AWS (server.py)."""

import json
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests.aws.conftest import REGION
from tests.aws.kit import NAME, WORKERS, Kit


def test_from_nothing_to_a_cluster_and_back(kit: Kit) -> None:
    kit.file.unlink()
    kit.run("init")
    assert "no errors, no warnings (16 checks, account 123456789012" in kit.run("validate")
    created = kit.run("create")
    assert f"{NAME} is complete: 1 ml.c5.xlarge, 1 ml.trn1.32xlarge" in created
    status = kit.json("status")
    assert status["complete"]
    assert {group["node_type"] for group in status["groups"]} == {"Controller", "Compute"}
    assert [node["status"] for node in kit.nodes()] == ["Running", "Running"]
    listed = kit.run("status", "--nodes")
    assert all(re.search(rf"{node['group']} +{node['instance_id']} .* Running", listed) for node in kit.nodes())

    key = kit.directory / ".ssh" / "id_ed25519"
    key.parent.mkdir(mode=0o700)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    dry = kit.run("ssh", "--dry-run")
    assert re.search(r"target +sagemaker-cluster:[a-z0-9]{12}_controller-machine-i-[0-9a-f]{17}\n", dry)

    (before,) = kit.workers()
    assert "Lifecycle scripts succeeded" in kit.run("logs", "--node", before)
    assert before in kit.run("events")
    kit.run("replace-node", NAME, before, "--yes")
    (after,) = kit.workers()
    assert after != before

    kit.run("scale", NAME, "worker-group-1", "3")
    assert len(kit.workers()) == 3
    assert "--yes" in kit.run("scale", NAME, "worker-group-1", "1", status=2)
    kit.run("scale", NAME, "worker-group-1", "1", "--yes")
    assert len(kit.workers()) == 1

    assert "--confirm" in kit.run("delete", status=2)
    assert "not deleted" in kit.run("delete", "--confirm", "other", status=2)
    kept = kit.run("delete", "--confirm", NAME)
    assert re.search(r"file system fs-[0-9a-f]+: 1200 GiB", kept)
    assert "bucket sagemaker-" in kept
    assert "NAT" not in kept.partition("Remaining in")[2]
    fsx = kit.aws.client("fsx")
    (volume,) = fsx.describe_file_systems()["FileSystems"]

    kit.run("create")
    (again,) = fsx.describe_file_systems()["FileSystems"]
    assert again["FileSystemId"] == volume["FileSystemId"], "the data is found again"
    assert "Nothing that costs money" in kit.run("delete", "--confirm", NAME, "--delete-data")
    assert fsx.describe_file_systems()["FileSystems"] == []
    assert kit.aws.client("s3").list_buckets()["Buckets"] == []
    assert f"no cluster '{NAME}'" in kit.run("status", status=2)


def test_create_continues_after_every_interruption(kit: Kit) -> None:
    """Killed while it waits in each step, then run again: one stack, one cluster, nothing created twice."""
    seconds = {"stack.resource": 0.1, "fsx.create": 0.5, "cluster.create": 3600, "node.launch": 0.5}
    # a kill may come late: until the cluster may be requested, none is
    refusal = {"service": "sagemaker", "operation": "CreateCluster", "code": "ThrottlingException", "times": 999}
    kit.aws.scenario(seconds=seconds, errors=[refusal])
    for expected in ("CREATE_COMPLETE", "lifecycle:"):
        kit.start("create").kill_at(expected)
    kit.aws.scenario(errors=[])
    refused = [operation for _, operation in kit.aws.requests()].count("CreateCluster")
    for expected in ("requested", "cluster: Creating"):
        kit.start("create").kill_at(expected)
    kit.aws.scenario(seconds={"cluster.create": 0})
    assert "is complete" in kit.run("create")
    operations = [operation for _, operation in kit.aws.requests()]
    assert operations.count("CreateStack") == 1
    assert kit.aws.client("sagemaker").list_clusters()["ClusterSummaries"][0]["ClusterName"] == NAME
    assert operations.count("CreateCluster") - refused <= 2, "a kill may fall between the request and its answer"


def test_a_failing_lifecycle_script_is_shown(kit: Kit) -> None:
    kit.configure(continuous_provisioning=False)
    lines = ["step fsx: mounting", "error: fsx: /fsx: no answer from fs-1"]
    kit.aws.scenario(lifecycle={"worker-group-1": {"lines": lines, "exit": 1, "times": 1}})
    output = kit.run("create", status=2)
    assert "error: fsx: /fsx: no answer from fs-1" in output
    assert re.search(r"--- LifecycleConfig/worker-group-1/i-[0-9a-f]{17}", output)
    assert output.splitlines()[-1].startswith(f"error: cluster {NAME}: ")


def test_logs_of_a_node_and_of_one_that_is_gone(kit: Kit) -> None:
    lines = ["hello from the worker", "2026-11-22T20:00:00.000Z slurm: warning (60.0 s): no slurmctld answers"]
    kit.aws.scenario(lifecycle={"worker-group-1": {"lines": lines, "exit": 0}})
    kit.run("create")
    (worker,) = kit.workers()
    assert f"warning: {worker}: when it was provisioned: no slurmctld answers" in kit.run("status")
    assert "hello from the worker" in kit.run("logs", "--node", worker)
    kit.run("replace-node", NAME, worker, "--yes")
    assert "hello from the worker" in kit.run("logs", "--node", worker)
    assert "no lifecycle log for node 'i-0'" in kit.run("logs", "--node", "i-0", status=2)


def test_training_plans_are_listed_with_their_prices_and_not_bought(kit: Kit) -> None:
    def offer(name: str, day: int, fee: str) -> dict[str, Any]:
        start = datetime(2027, 1, day, 11, 30, tzinfo=timezone.utc).timestamp()
        part = {"InstanceType": "ml.trn2.48xlarge", "InstanceCount": 2, "StartTime": start}
        about = {"TrainingPlanOfferingId": name, "UpfrontFee": fee, "CurrencyCode": "USD", "DurationHours": 72}
        part |= {"AvailabilityZone": "us-west-2d"}
        return about | {"TargetResources": ["hyperpod-cluster"], "ReservedCapacityOfferings": [part]}

    kit.aws.scenario(plan_offerings=[offer("late", 9, "1440.00"), offer("early", 2, "2880.00")])
    asked = ("plans", "--instance", "trn2.48xlarge", "--count", "2", "--days", "3", "--region", REGION)
    listed = kit.run(*asked)
    row = r"2027-01-02 11:30 +3 +2 x ml.trn2.48xlarge +usw2-az4 +2,880.00 USD +20.00 +early\n2027-01-09"
    assert re.search(row, listed) and f"create-training-plan --region {REGION}" in listed
    (late,) = json.loads(kit.run(*asked, "--from", "2027-01-03", "--json"))
    assert (late["id"], late["fee"], late["per_instance_hour"]) == ("late", 1440.0, 10.0)
    assert "offers none" in kit.run(*asked, "--training-jobs")
    unknown = kit.run("plans", "--instance", "trn2.49xlarge", "--region", REGION, status=2)
    assert "InstanceType: 'ml.trn2.49xlarge'" in unknown and "ml.trn2.48xlarge" in unknown
    assert {operation for _, operation in kit.aws.requests()} == {
        "SearchTrainingPlanOfferings",
        "DescribeAvailabilityZones",
    }


def test_errors_stop_create_before_anything_is_made(kit: Kit) -> None:
    kit.configure(workers=[{"name": "w", "instance_type": "ml.trn1.33xlarge"}])
    output = kit.run("create", status=2)
    assert "workers.0.instance_type" in output
    assert "ml.trn1.32xlarge" in output, "the closest known type is named"
    assert kit.aws.client("cloudformation").describe_stacks()["Stacks"] == []


def test_validate_tells_problems_of_the_file_with_exit_code_1(kit: Kit) -> None:
    kit.configure(users=[{"name": "a", "uid": 2001}, {"name": "b", "uid": 2001}], regoin="x")
    output = kit.run("validate", status=1)
    assert "did you mean region?" in output
    assert json.loads(kit.run("validate", "--json", status=1))["findings"]


def test_create_again_adds_groups_and_new_lifecycle_files(kit: Kit) -> None:
    kit.run("create")
    before = {group["lifecycle_uri"] for group in kit.json("status")["groups"]}
    worker = {"instance_type": "ml.trn1.32xlarge"}
    kit.configure(
        users=[{"name": "alice", "uid": 2001}],
        workers=[{"name": "worker-group-1", "count": 2, **worker}, {"name": "worker-group-2", **worker}],
    )
    output = kit.run("create")
    groups = {group["name"]: group for group in kit.json("status")["groups"]}
    assert set(groups) == {"controller-machine", "worker-group-1", "worker-group-2"}
    assert len({group["lifecycle_uri"] for group in groups.values()} | before) == 2
    assert groups["worker-group-1"]["target"] == 1, "counts are changed by scale alone"
    assert f"hyperpod-ft cluster scale {NAME} worker-group-1 2" in output
    bucket, _, folder = groups["worker-group-1"]["lifecycle_uri"].removeprefix("s3://").partition("/")
    body = kit.aws.client("s3").get_object(Bucket=bucket, Key=f"{folder}/settings.json")["Body"].read()
    assert json.loads(body)["users"] == [{"name": "alice", "uid": 2001, "gid": 2001, "public_keys": []}]


def test_ssh_by_the_clusters_name_logs_in_as_the_user_with_the_key(kit: Kit) -> None:
    (kit.directory / ".ssh").mkdir(mode=0o700)
    for name in ("alice", "stranger"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(kit.directory / ".ssh" / name)], check=True
        )
    key = (kit.directory / ".ssh" / "alice.pub").read_text().strip()
    kit.configure(users=[{"name": "alice", "uid": 2001, "public_keys": [key]}])
    kit.run("create")
    kit.file.unlink()
    assert " -l alice " in kit.run("ssh", NAME, "--dry-run", "-i", ".ssh/alice")
    assert "--user: alice" in kit.run("ssh", NAME, "--dry-run", "-i", ".ssh/stranger", status=2)
    denied = {"service": "s3", "operation": "GET", "code": "AccessDenied", "status": 403}
    kit.aws.scenario(errors=[denied])
    refused = kit.run("ssh", NAME, "--dry-run", "-i", ".ssh/alice", status=2)
    assert "s3:GetObject" in refused
    assert "--user" in refused
    s3 = kit.aws.client("s3")
    uri = kit.json("status", NAME)["groups"][0]["lifecycle_uri"]
    bucket, _, folder = uri.removeprefix("s3://").partition("/")
    s3.delete_object(Bucket=bucket, Key=f"{folder}/settings.json")
    assert " -l ubuntu " in kit.run("ssh", NAME, "--dry-run", "-i", ".ssh/stranger"), "a cluster of other scripts"


def test_differences_that_stay_are_reported(kit: Kit) -> None:
    refusal = {
        "service": "sagemaker",
        "operation": "CreateCluster",
        "code": "ValidationException",
        "message": "Could not assume role arn:aws:iam::123456789012:role/x. Please ensure that the role exists.",
        "times": 3,
    }
    kit.aws.scenario(errors=[refusal])
    assert "is complete" in kit.run("create"), "its role is not known everywhere yet"
    kit.configure(node_recovery="None", controller={"volume_gb": 600})
    output = kit.run("create")
    assert "node_recovery: is Automatic, not None" in output
    assert "controller.volume_gb: controller-machine has" in output
    kit.configure()
    assert "set provisioning: api" in kit.run("create", "--set", "provisioning=legacy", status=2)


def test_legacy_provisioning_whose_groups_have_no_roles(kit: Kit) -> None:
    kit.configure(login={"instance_type": "ml.m5.xlarge"}, provisioning="legacy")
    kit.run("create")
    described = kit.aws.client("sagemaker").describe_cluster(ClusterName=NAME)
    for group in described["InstanceGroups"]:
        assert group["LifeCycleConfig"]["OnCreate"] == "provision.sh"
        assert "SlurmConfig" not in group
    for count in ("0", "2"):
        refused = kit.run("scale", str(kit.file), "controller-machine", count, "--yes", status=2)
        assert "is the controller group" in refused
    kit.run("scale", NAME, WORKERS, "2")
    assert len(kit.workers()) == 2
    assert f"{WORKERS}: HyperPod will" in kit.run("auto-patch", NAME, "WhenIdle", status=2)
    kit.run("auto-patch", NAME, "WhenIdle", "--yes")
    described = kit.aws.client("sagemaker").describe_cluster(ClusterName=NAME)
    assert [group["InstanceGroupName"] for group in described["InstanceGroups"] if "AutoPatchConfig" in group] == [
        WORKERS
    ]
    kit.run("delete-group", NAME, WORKERS, "--yes")
    assert "has no group of workers" in kit.run("auto-patch", NAME, "WhenIdle", "--yes", status=2)


def test_existing_resources_are_used_and_never_deleted(kit: Kit, tmp_path: Path) -> None:
    kit.run("create")
    outputs = {
        output["OutputKey"]: output["OutputValue"]
        for output in kit.aws.client("cloudformation").describe_stacks()["Stacks"][0]["Outputs"]
    }
    kit.configure(
        name="second",
        existing={
            "subnet_id": outputs["PrivateSubnetId"],
            "security_group_ids": [outputs["SecurityGroupId"]],
            "execution_role_arn": outputs["RoleArn"],
            "bucket": outputs["Bucket"],
            "fsx_id": outputs["FsxId"],
        },
    )
    assert "second is complete" in kit.run("create")
    assert "your own" in kit.run("delete", "--confirm", "second", "--delete-data", status=2)
    kit.run("delete", "--confirm", "second")
    assert len(kit.aws.client("fsx").describe_file_systems()["FileSystems"]) == 1
    assert len(kit.aws.client("cloudformation").describe_stacks()["Stacks"]) == 1


def test_without_continuous_provisioning_a_group_is_updated(kit: Kit) -> None:
    kit.configure(continuous_provisioning=False)
    kit.run("create")
    kit.run("scale", NAME, WORKERS, "2")
    assert "BatchAddClusterNodes" not in [operation for _, operation in kit.aws.requests()]
    assert len(kit.workers()) == 2
    assert "with continuous provisioning only" in kit.run("events", status=2)
