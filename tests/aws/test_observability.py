"""`hyperpod-ft cluster observability`, against the server that stands in for AWS."""

import json

import pytest

from tests.aws.kit import NAME, Kit

DENIED = {"Code": "AccessDenied", "Message": "aps:RemoteWrite is denied", "NodeCount": 1}


def test_the_extension_is_installed_changed_and_removed(running: Kit) -> None:
    assert running.run("observability", NAME) == "not installed\n"
    output = running.run("observability", NAME, "--install")
    assert "1.0.0  Active  4 of 4 nodes" in output
    settings = {"metricsProvider": {"nodeMetrics": {"level": "ADVANCED"}}}
    running.run("observability", NAME, "--install", "--settings", json.dumps(settings))
    shown = running.json("observability", NAME)
    assert (shown["status"], json.loads(shown["settings"])) == ("Active", settings)
    operations = [operation for _, operation in running.aws.requests()]
    assert (operations.count("CreateClusterExtension"), operations.count("UpdateClusterExtension")) == (1, 1)
    assert "--yes" in running.run("observability", NAME, "--remove", status=2)
    assert running.run("observability", NAME, "--remove", "--yes").endswith("not installed\n")
    assert running.json("observability", NAME) is None


def test_what_keeps_it_from_working_is_reported_and_tried_again(running: Kit) -> None:
    running.aws.scenario(extension_issues=[DENIED])
    output = running.run("observability", NAME, "--install", status=2)
    assert "Degraded: 1 nodes: AccessDenied: aps:RemoteWrite is denied" in output
    assert "3 of 4 nodes\n1 nodes: AccessDenied" in running.run("observability", NAME)
    running.aws.scenario(extension_issues=[])
    assert "Active  4 of 4 nodes" in running.run("observability", NAME, "--install")


def test_a_removal_that_fails_is_reported(running: Kit) -> None:
    running.run("observability", NAME, "--install")
    running.aws.scenario(extension_issues=[DENIED])
    output = running.run("observability", NAME, "--remove", "--yes", status=2)
    assert "DeleteFailed: 1 nodes: AccessDenied: aps:RemoteWrite is denied; fix the cause" in output


def test_the_state_before_a_change_is_not_taken_for_its_end(running: Kit) -> None:
    running.run("observability", NAME, "--install")
    running.aws.scenario(seconds={"extension.shown": 0.1, "extension.node": 3600})
    command = running.start("observability", NAME, "--install")
    command.wait_for(": Updating")
    running.aws.scenario(seconds={"extension.node": 0})
    assert ": Active, 4 of 4" in command.finish()
    assert running.run("observability", NAME, "--remove", "--yes").endswith("not installed\n")


def test_a_cluster_that_cannot_have_extensions(kit: Kit) -> None:
    kit.configure(continuous_provisioning=False)
    kit.run("create")
    assert "continuous provisioning" in kit.run("observability", NAME, "--install", status=2)
    assert "CreateClusterExtension" not in [operation for _, operation in kit.aws.requests()]


@pytest.mark.parametrize("settings", ["{", "[]", '{"a": "' + "x" * 10_240 + '"}'])
def test_settings_are_a_json_object(kit: Kit, settings: str) -> None:
    assert "--settings: " in kit.run("observability", NAME, "--install", "--settings", settings, status=2)
    assert "pass one of them" in kit.run("observability", NAME, "--settings", "{}", status=2)
