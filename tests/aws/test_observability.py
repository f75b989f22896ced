"""`hyperpod-ft cluster observability`, against the server that stands in for AWS."""

import json

import pytest

from tests.aws.kit import NAME, Kit

DENIED = {"Code": "AccessDenied", "Message": "aps:RemoteWrite is denied", "NodeCount": 1}


def test_the_extension_is_installed_changed_and_removed(kit: Kit) -> None:
    kit.run("create")
    assert kit.run("observability", NAME) == "not installed\n"
    output = kit.run("observability", NAME, "--install")
    assert "1.0.0  Active  2 of 2 nodes" in output
    settings = {"metricsProvider": {"nodeMetrics": {"level": "ADVANCED"}}}
    kit.run("observability", NAME, "--install", "--settings", json.dumps(settings))
    shown = kit.json("observability", NAME)
    assert (shown["status"], json.loads(shown["settings"])) == ("Active", settings)
    operations = [operation for _, operation in kit.aws.requests()]
    assert (operations.count("CreateClusterExtension"), operations.count("UpdateClusterExtension")) == (1, 1)
    assert "--yes" in kit.run("observability", NAME, "--remove", status=2)
    assert kit.run("observability", NAME, "--remove", "--yes").endswith("not installed\n")
    assert kit.json("observability", NAME) is None


def test_what_keeps_it_from_working_is_reported_and_tried_again(kit: Kit) -> None:
    kit.run("create")
    kit.aws.scenario(extension_issues=[DENIED])
    output = kit.run("observability", NAME, "--install", status=2)
    assert "Degraded: 1 nodes: AccessDenied: aps:RemoteWrite is denied" in output
    assert "1 of 2 nodes\n1 nodes: AccessDenied" in kit.run("observability", NAME)
    kit.aws.scenario(extension_issues=[])
    assert "Active  2 of 2 nodes" in kit.run("observability", NAME, "--install")


def test_a_removal_that_fails_is_reported(kit: Kit) -> None:
    kit.run("create")
    kit.run("observability", NAME, "--install")
    kit.aws.scenario(extension_issues=[DENIED])
    output = kit.run("observability", NAME, "--remove", "--yes", status=2)
    assert "DeleteFailed: 1 nodes: AccessDenied: aps:RemoteWrite is denied; fix the cause" in output


def test_the_state_before_a_change_is_not_taken_for_its_end(kit: Kit) -> None:
    kit.run("create")
    kit.run("observability", NAME, "--install")
    kit.aws.scenario(seconds={"extension.shown": 0.1, "extension.node": 1})
    output = kit.run("observability", NAME, "--install")
    assert output.index(": Updating") < output.index(": Active, 2 of 2")
    assert kit.run("observability", NAME, "--remove", "--yes").endswith("not installed\n")


def test_a_cluster_that_cannot_have_extensions(kit: Kit) -> None:
    kit.configure(continuous_provisioning=False)
    kit.run("create")
    assert "continuous provisioning" in kit.run("observability", NAME, "--install", status=2)
    assert "CreateClusterExtension" not in [operation for _, operation in kit.aws.requests()]


@pytest.mark.parametrize("settings", ["{", "[]", '{"a": "' + "x" * 10_240 + '"}'])
def test_settings_are_a_json_object(kit: Kit, settings: str) -> None:
    assert "--settings: " in kit.run("observability", NAME, "--install", "--settings", settings, status=2)
    assert "pass one of them" in kit.run("observability", NAME, "--settings", "{}", status=2)
