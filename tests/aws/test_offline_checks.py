"""A cluster file checked without an account; each check on wrong and on valid files."""

import re
import socket
from pathlib import Path

import pytest

pytest.importorskip("botocore")
from hyperpod_ft.aws.checks.account import ValidationResult, usable, wanted
from hyperpod_ft.cluster.hyperpod import lifecycle_files
from hyperpod_ft.cluster.validation import offline_checks
from hyperpod_ft.cluster.validation.check_input import instances_of
from hyperpod_ft.cluster.validation.validate import validate_offline
from hyperpod_ft.shipped import shipped
from tests.aws.account_place import config, only, workers

PLAN = "arn:aws:sagemaker:us-west-2:123456789012:training-plan/plan-1"


EXISTING = {
    "subnet_id": "subnet-0123456789abcdef0",
    "security_group_ids": ["sg-0123456789abcdef0"],
    "execution_role_arn": "arn:aws:iam::123456789012:role/hyperpod",
    "bucket": "sagemaker-mine",
    "fsx_id": "fs-0123456789abcdef0",
}


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lifecycle folder that only this test uses."""
    folder = tmp_path / "lifecycle"
    folder.mkdir()
    (folder / "provision.sh").write_bytes(b"#!/bin/bash\ntrue\n")
    monkeypatch.setattr(lifecycle_files, "shipped", lambda name: tmp_path / name)
    return folder


DATABASE = {
    "endpoint": "jobs.c1.us-west-2.rds.amazonaws.com",
    "name": "jobs",
    "secret_arn": "arn:aws:secretsmanager:us-west-2:123456789012:secret:jobs-AbCdEf",
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"provisioning": "legacy", "accounting": "controller"},
        {"accounting": "rds", "accounting_database": DATABASE},
        {"login": {}, "tags": {"team": "größe"}, "existing": EXISTING, "continuous_provisioning": False},
        workers(
            training_plan_arn=PLAN, partition="p", instance_type="ml.p5.48xlarge", deep_health_checks=["InstanceStress"]
        ),
        workers(image_id="ami-0123456789abcdef0", auto_patch="WhenAllIdle"),
        {"region": "us-gov-west-1", "availability_zone_id": "usgw1-az1"},
    ],
)
def test_a_right_file_has_no_findings(changes):
    checked = validate_offline(config(**changes))
    assert checked.findings == ()
    assert not checked.has_errors
    assert "region" in checked.done


def test_results_add_up():
    made = ValidationResult((), ("name",), ("quotas: because",), 2.0, "123456789012")
    both = validate_offline(config()) + made
    assert both.done[-1] == "name"
    assert both.skipped == ("quotas: because",)
    assert both.seconds > 2
    assert both.account == "123456789012"


def test_it_needs_neither_network_nor_credentials(monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("connected"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    assert validate_offline(config()).findings == ()


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        (workers(instance_type="ml.trn1.32xlrage"), "workers.0.instance_type", "did you mean ml.trn1.32xlarge?"),
        ({"controller": {"instance_type": "ml.c9.xlarge"}}, "controller.instance_type", "did you mean ml.c"),
        ({"login": {"instance_type": "ml.zz.top"}}, "login.instance_type", "'ml.zz.top'"),
        (workers(training_plan_arn=PLAN + "p" * 2000), "workers.0.training_plan_arn", "at most 2048"),
        ({"tags": {"a*": "b"}}, "tags.a*", "does not match"),
        ({"tags": {"team": "x" * 257}}, "tags.team", "at most 256"),
        ({"region": "us-west-9", "availability_zone_id": "usw9-az1"}, "region", "did you mean us-west-"),
        ({"availability_zone_id": "use1-az4"}, "availability_zone_id", "usw2-az1"),
        ({"existing": {**EXISTING, "bucket": "mine"}}, "existing.bucket", "sagemaker-"),
        (workers(instance_type="ml.p5.48xlarge", count=1024), "workers", "10.0.0.0/17"),
        (
            workers(instance_type="ml.m5.xlarge", deep_health_checks=["InstanceStress"]),
            "workers.0.deep_health_checks",
            "no accelerators",
        ),
        (workers(training_plan_arn=PLAN.replace("us-west-2", "us-east-1")), "workers.0.training_plan_arn", "us-east-1"),
    ],
)
def test_errors_name_the_key_of_the_cluster_file(changes, field, said):
    errors = [finding for finding in validate_offline(config(**changes)).findings if finding.name == field]
    assert errors, validate_offline(config(**changes)).findings
    assert all(finding.verdict == "error" for finding in errors)
    assert any(said in str(finding) for finding in errors)
    assert validate_offline(config(**changes)).has_errors


def test_health_checks_on_trainium_are_a_warning():
    finding = only(validate_offline(config(**workers(deep_health_checks=["InstanceStress"]))).findings)
    assert (finding.verdict, finding.name) == ("warning", "workers.0.deep_health_checks")


def test_a_region_of_another_form_is_a_warning_for_its_zone():
    finding = only(offline_checks.zone(config(region="us-iso-east-1", availability_zone_id="usie1-az1")))
    assert finding.verdict == "warning"
    assert "could not check" in finding.found


def test_addresses():
    # a Trainium1 node has 8 network cards, a P5 32; AWS reserves 5 addresses of a subnet
    assert wanted(instances_of(config())) == 1 + 2 * 8
    assert wanted(instances_of(config(**workers(instance_type="ml.p5.48xlarge")))) == 1 + 2 * 32
    assert wanted(instances_of(config()), {"ml.trn1.32xlarge": 2}) == 1 + 2 * 2
    assert usable("10.0.0.0/28") == 11
    assert validate_offline(config(**workers(instance_type="ml.p5.48xlarge", count=1023))).findings == ()


def test_the_private_subnet_is_the_templates():
    template = shipped("templates") / "cluster/stack.yaml"
    if not template.is_file():
        pytest.skip("no templates/cluster/stack.yaml")
    (cidr,) = re.findall(r"^  PrivateSubnet:\n(?:    .*\n)*?      CidrBlock: (\S+)", template.read_text(), re.M)
    assert cidr == offline_checks.PRIVATE_SUBNET


@pytest.mark.parametrize(
    ("text", "said"), [(b"#!/bin/bash\r\ntrue\r\n", "line endings"), (b"true\n", "no #! line"), (b"", "missing")]
)
def test_lifecycle_scripts_that_bash_would_not_run(scripts, text, said):
    (scripts / "provision.sh").write_bytes(text)
    assert said in only(validate_offline(config()).findings).found
