"""`hyperpod-ft sagemaker validate` on the stand-in for AWS: a valid account passes, and each mistake is found."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.aws.checks.account import ValidationResult
from hyperpod_ft.config import run_file
from hyperpod_ft.findings import Finding
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker.cli.setup import STACK
from hyperpod_ft.sagemaker.resources import deploy
from hyperpod_ft.sagemaker.validation import validate
from tests.aws.account_place import PLAN, Place, allow, clients, of, only, put_image, trust
from tests.aws.conftest import REGION, Aws, kit_session
from tests.aws.kit import Kit
from tests.conftest import run_file_values

IMAGE_ACCOUNT = "123456789012"  # moto's: images are looked up in one's own account


@pytest.fixture
def section(aws: Aws) -> dict[str, Any]:
    """What `sagemaker setup` prints, and an image in ECR."""
    made = deploy(kit_session(), lambda _: None, name=STACK)
    return {
        "region": made.region,
        "role": made.role_arn,
        "store": f"s3://{made.bucket}/ft",
        "image": f"{IMAGE_ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/own:1",
    }


@pytest.fixture
def check(aws: Aws, section: dict[str, Any], tmp_path: Path) -> Callable[..., ValidationResult]:
    put_image(aws, section["image"])

    def run_checks(changes: dict[str, Any] | None = None, **overrides: Any) -> ValidationResult:
        overrides = {"cluster__instance_type": "c7i.xlarge", **overrides}
        values = run_file_values(tmp_path, sagemaker=section | (changes or {}), **overrides)
        return validate(Run.of(run_file.validate(values, "run.yaml")), clients(aws))

    return run_checks


def errors(checked: ValidationResult) -> list[Finding]:
    return [finding for finding in checked.findings if finding.verdict == "error"]


def test_what_setup_makes_passes(check: Callable[..., ValidationResult]) -> None:
    checked = check({"remote_debug": True})
    assert checked.findings == ()
    assert checked.skipped == ()
    assert "permissions of the role to create the next job" in checked.done


def test_quotas_of_both_types_spot_and_warm_pools(check: Callable[..., ValidationResult]) -> None:
    checked = check({"cpu_instance_type": "m7i.large"}, cluster__nodes=5, parallelism__tensor_parallel=1)
    assert (
        "ml.c7i.xlarge for training job usage` is 4; 5 are needed" in only(of(checked, "cluster.instance_type")).found
    )
    found = only(of(checked, "sagemaker.cpu_instance_type"))
    assert "ml.m7i.large for training job usage` is 0" in found.found
    assert "request-service-quota-increase" in found.remedy
    assert "ml.c7i.xlarge for spot training job usage" in only(errors(check({"spot": True}))).found
    other = check({"cpu_instance_type": "m7i.xlarge", "other_instance_types": ["c7i.48xlarge"]})
    assert "ml.c7i.48xlarge for training job usage" in only(of(other, "sagemaker.other_instance_types")).found
    checked = check({"keep_alive": 10})
    assert "ml.c7i.xlarge for training warm pool usage" in only(of(checked, "sagemaker.keep_alive")).found


def test_quotas_for_the_next_job_beside_the_one_that_creates_it(
    aws: Aws, check: Callable[..., ValidationResult]
) -> None:
    found = only(check(cluster__nodes=3, parallelism__tensor_parallel=1).findings)
    assert (found.verdict, found.name) == ("warning", "cluster.instance_type")
    assert "ml.c7i.xlarge for training job usage` is 4: too small" in found.found
    assert "--desired-value 6" in found.remedy, "another training may continue it"
    gpu = {"cluster__instance_type": "g6e.12xlarge", "cluster__nodes": 1}
    quota, spot = (f"ml.g6e.12xlarge for {kind}training job usage" for kind in ("", "spot "))
    aws.scenario(quotas={quota: 1.0, spot: 2.0})
    assert "--desired-value 2" in only(check(**gpu).findings).remedy, "finish answers on the training's GPUs"
    assert check({"spot": True}, **gpu).findings == (), "finish, which is not on spot instances, has a quota of its own"
    aws.scenario(quotas={quota: 2.0})
    assert check(**gpu).findings == ()


def test_mail_is_slurms(check: Callable[..., ValidationResult]) -> None:
    found = only(check(cluster__mail_user="me@example.com").findings)
    assert (found.verdict, found.name) == ("warning", "cluster.mail_user")


def test_a_missing_image(check: Callable[..., ValidationResult]) -> None:
    uri = f"{IMAGE_ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com"
    for name in ("own:2", "other:1"):
        assert only(errors(check({"image": f"{uri}/{name}"}))).found == f"no image {uri}/{name}"
    elsewhere = only(check({"image": "public.ecr.aws/deep-learning-containers/pytorch:1"}).findings)
    assert (elsewhere.verdict, elsewhere.name) == ("warning", "sagemaker.image")


def test_roles(aws: Aws, section: dict[str, Any], check: Callable[..., ValidationResult]) -> None:
    account, iam = section["role"].rpartition("/")[0], aws.client("iam")
    assert "no role missing" in only(errors(check({"role": f"{account}/missing"}))).found
    iam.create_role(RoleName="untrusted", AssumeRolePolicyDocument=trust("ec2.amazonaws.com"))
    allow(iam, "untrusted", "*")
    assert "does not trust" in only(errors(check({"role": f"{account}/untrusted"}))).found
    iam.create_role(RoleName="weak", AssumeRolePolicyDocument=trust("sagemaker.amazonaws.com"))
    allow(iam, "weak", "logs:*", "ecr:*", "s3:Get*", "s3:List*")
    checked = check({"role": f"{account}/weak"})
    assert "s3:PutObject" in only(errors(checked)).found
    assert "ssmmessages:" not in only(errors(checked)).found
    debugged = only(errors(check({"role": f"{account}/weak", "remote_debug": True}))).found
    assert "ssmmessages:OpenDataChannel" in debugged
    alone = only([finding for finding in checked.findings if finding.verdict == "warning"])
    assert "sagemaker:CreateTrainingJob" in alone.found
    assert "submit --watch" in alone.remedy


def test_sources_in_buckets_that_the_role_cannot_read(
    aws: Aws, section: dict[str, Any], check: Callable[..., ValidationResult]
) -> None:
    """A single object too; what the store's bucket has can be read."""
    own = section["store"].removesuffix("/ft")
    checked = check(model__source="s3://theirs/llama", dataset__source="s3://others/rows.jsonl")
    assert {finding.name for finding in errors(checked)} == {"model.source", "dataset.source"}
    for key, source in (("model.source", "s3://theirs/llama"), ("dataset.source", "s3://others/rows.jsonl")):
        found = only(of(checked, key))
        assert "s3:ListBucket, s3:GetObject" in found.found and source in found.remedy
    assert check(model__source=f"{own}/llama", dataset__source=f"{own}/rows.jsonl").findings == ()
    iam, role = aws.client("iam"), section["role"].rpartition("/")[2]
    read = {"Effect": "Allow", "Action": ["s3:ListBucket", "s3:GetObject"]}
    read["Resource"] = ["arn:aws:s3:::theirs", "arn:aws:s3:::theirs/llama/*"]
    policy = {"Version": "2012-10-17", "Statement": [read]}
    iam.put_role_policy(RoleName=role, PolicyName="read", PolicyDocument=json.dumps(policy))
    assert check(model__source="s3://theirs/llama").findings == ()
    iam.delete_role_policy(RoleName=role, PolicyName="read")


def test_a_bucket_that_is_missing(check: Callable[..., ValidationResult]) -> None:
    checked = check({"store": "s3://nobodys-bucket-here/ft"})
    assert "no bucket nobodys-bucket-here" in only(of(checked, "sagemaker.store")).found


def test_training_plans(aws: Aws, check: Callable[..., ValidationResult]) -> None:
    field = "sagemaker.training_plan"
    assert "no training plan plan-1" in only(of(check({"training_plan": PLAN}), field)).found
    plan = {
        "Status": "Active",
        "TargetResources": ["hyperpod-cluster"],
        "ReservedCapacitySummaries": [{"InstanceType": "ml.p5.48xlarge", "AvailabilityZoneId": "usw2-az1"}],
    }
    aws.scenario(training_plans={"plan-1": plan})
    checked = check({"training_plan": PLAN})
    assert only(of(checked, field)).remedy == "name one for training-job"
    assert "reserves ml.p5.48xlarge, not ml.c7i.xlarge" in only(of(checked, "cluster.instance_type")).found
    plan |= {"TargetResources": ["training-job"], "ReservedCapacitySummaries": [{"InstanceType": "ml.c7i.xlarge"}]}
    aws.scenario(training_plans={"plan-1": plan})
    assert check({"training_plan": PLAN}).findings == ()


def test_a_file_system(place: Place, aws: Aws, section: dict[str, Any], check: Callable[..., ValidationResult]) -> None:
    deploy(kit_session(), lambda _: None, name=STACK, file_system=True)
    mounted = {
        "id": place.fsx,
        "directory": "/abcdefgh/ft",
        "subnets": [place.subnet],
        "security_groups": [place.group],
    }

    def on(output: str = section["store"], **changes: Any) -> ValidationResult:
        return check({"store": None, "file_system": mounted | changes, "output": output}, cluster__nodes=2)

    assert on().findings == ()
    missing = on(output="s3://nobodys-bucket-here/x")
    assert "no bucket nobodys-bucket-here" in only(of(missing, "sagemaker.output")).found
    (found,) = errors(on(output=f"s3://{place.bucket}/x"))
    assert (found.name, "s3:PutObject" in found.found) == ("sagemaker.role", True)
    assert "no file system" in only(errors(on(id="fs-0123456789abcdef0"))).found
    assert only(errors(on(subnets=["subnet-0123456789abcdef0"]))).name == "sagemaker.file_system.subnets"
    closed = place.security_group("closed", inward=False)
    fields = {finding.name for finding in errors(on(security_groups=[closed]))}
    assert fields == {"sagemaker.file_system.id", "sagemaker.file_system.security_groups"}


def test_offline_checks_come_first(check: Callable[..., ValidationResult], aws: Aws) -> None:
    checked = check({"region": "us-west-9", "image": None}, cluster__instance_type="local")
    assert {finding.name for finding in checked.findings} == {"sagemaker.region", "cluster.instance_type"}
    before = len(aws.requests())
    unknown = check({"cpu_instance_type": "x1.huge"})
    assert only(unknown.findings).name == "sagemaker.cpu_instance_type"
    assert len(aws.requests()) == before, "the account was not asked"


def test_the_command(kit: Kit, section: dict[str, Any], check: Callable[..., ValidationResult]) -> None:
    values = run_file_values(kit.directory / "root", sagemaker=section, cluster__instance_type="c7i.xlarge")
    (kit.directory / "run.yaml").write_text(json.dumps(values))
    assert "no errors" in kit.run_any("sagemaker", "validate", "run.yaml")
    short = kit.run_any("sagemaker", "validate", "run.yaml", "--set", "sagemaker.spot=true", status=1)
    assert "error: cluster.instance_type: quota `ml.c7i.xlarge for spot training job usage`" in short
    assert "offline" in kit.run_any("sagemaker", "validate", "run.yaml", "--set", "sagemaker.spot=true", "--offline")
    (kit.directory / "run.yaml").write_text(json.dumps(values | {"sagemaker": None}))
    assert "no section sagemaker" in kit.run_any("sagemaker", "validate", "run.yaml", status=2)
