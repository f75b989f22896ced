"""Why instances are missing, and what HyperPod did: `create`, `status` and `events`, against the stand-in for AWS."""

import re

from tests.aws.kit import NAME, Kit

NO_CAPACITY = "We currently do not have sufficient capacity to launch new ml.trn1.32xlarge instances"


def test_missing_capacity_is_explained_and_the_wait_ends(kit: Kit) -> None:
    """Only events have the reason: ListClusterNodes has none for a node without an instance."""
    kit.aws.scenario(capacity={"ml.trn1.32xlarge": 0})
    output = kit.run("create", "--timeout", "0.02", status=2)
    assert "worker-group-1 has 0 of 1" in output
    assert f"worker-group-1 lacks instances: {NO_CAPACITY}" in output
    assert "cluster scale" in output
    status = kit.run("status")
    assert "0 of 1" in status
    assert "1 Pending" in status, "a node without an instance is listed too"
    assert f"worker-group-1 lacks instances: {NO_CAPACITY}" in status
    assert NO_CAPACITY in kit.json("status")["missing"]["worker-group-1"]

    events = kit.json("events", "--group", "worker-group-1", "-n", "500")
    failed = [event for event in events if event["level"] == "Error"]
    assert failed[0]["description"].startswith("Failed to provision EC2 Instance")
    assert NO_CAPACITY in failed[0]["reason"]
    assert {event["group"] for event in events} == {"worker-group-1"}
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    assert len(kit.json("events", "-n", "2")) == 2
    (controller,) = [node for node in kit.nodes() if node["group"] == "controller-machine"]
    table = kit.run("events", "--node", controller["instance_id"])
    assert controller["instance_id"] in table
    assert "worker-group-1" not in table
    assert kit.run("events", "--node", controller["hostname"]) == table
    assert "no node 'ip-10-1-99-9'" in kit.run("events", "--node", "ip-10-1-99-9", status=2), "one that is gone"
    assert "known: controller-machine, worker-group-1" in kit.run("events", "--group", "worker-grup-1", status=2)


def test_who_may_not_read_events_still_waits(kit: Kit) -> None:
    denied = {
        "code": "AccessDeniedException",
        "message": "User: x is not authorized to perform: sagemaker:ListClusterEvents",
    }
    refusal = {"service": "sagemaker", "operation": "ListClusterEvents", **denied, "times": 999}
    kit.aws.scenario(errors=[refusal], capacity={"ml.trn1.32xlarge": 0})
    command = kit.start("create")
    command.wait_for("worker-group-1 lacks instances: events: access denied to sagemaker:ListClusterEvents")
    kit.aws.scenario(capacity={"ml.trn1.32xlarge": 1})
    assert "is complete" in command.finish()


def test_a_node_that_fails_once_is_reported_and_waited_for(kit: Kit) -> None:
    kit.configure(workers=[{"name": name, "instance_type": "ml.trn1.32xlarge"} for name in ("worker-group-1", "b")])
    kit.aws.scenario(
        lifecycle={
            "worker-group-1": {"lines": ["error: fsx: not writable yet"], "exit": 1, "times": 1},
            "b": {"lines": ["error: users: no answer"], "exit": 1, "times": 1},
        },
        seconds={"node.failed": 2.0},  # it is looked for every 0.02 s, on a busy machine less often
    )
    output = kit.run("create")
    assert output.count("error: fsx: not writable yet") == 1
    assert output.count("error: users: no answer") == 1, "each group's log"
    assert re.search(r"worker-group-1 i-[0-9a-f]{17} failed: attempt 1 of 3", output)
    assert f"{NAME} is complete" in output


def test_a_node_that_fails_three_times_ends_the_wait(kit: Kit) -> None:
    kit.aws.scenario(
        lifecycle={"worker-group-1": {"lines": ["error: fsx: no such file system"], "exit": 1, "times": 99}}
    )
    output = kit.run("create", status=2)
    assert output.count("error: fsx: no such file system") == 1, "its log is printed once"
    assert "attempt 2 of 3" in output
    last = output.splitlines()[-1]
    assert "Lifecycle scripts did not run successfully" in last
    assert "to end the attempts: hyperpod-ft cluster scale cluster.yaml worker-group-1 COUNT" in last
