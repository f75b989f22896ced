"""`cluster validate` as a whole: which checks run, with whose credentials, and which could not run."""

import boto3
import pytest

from hyperpod_ft.aws.session import Session
from hyperpod_ft.cluster.stack.stack import deploy
from hyperpod_ft.cluster.validation.validate import account_checks, validate_account
from hyperpod_ft.errors import UserError
from hyperpod_ft.findings import error
from tests.aws.account_place import PLAN, Place, check, clients, cluster, config, only, workers
from tests.aws.conftest import REGION, Aws
from tests.aws.world import ACCOUNT


def test_nothing_wrong_nothing_found_and_nothing_changed(place: Place) -> None:
    before = len(place.aws.requests())
    checked = place.check()
    assert checked.findings == ()
    assert checked.skipped == ()
    assert set(checked.done) == {check.name for check in account_checks(place.config())}
    assert checked.account == ACCOUNT
    asked = {operation for _, operation in place.aws.requests()[before:]}
    assert asked
    assert all(name.startswith(("Describe", "List", "Get", "Simulate", "HEAD", "GET")) for name in asked), asked


def test_what_the_kits_own_stack_makes_passes_as_existing(aws: Aws) -> None:
    """The stack's network, security group, file system, role with its policies, and bucket satisfy the checks."""
    session = Session(region=REGION)
    made = deploy(session, config())
    existing = {
        "subnet_id": made.subnet_id,
        "security_group_ids": list(made.security_group_ids),
        "execution_role_arn": made.role_arn,
        "bucket": made.bucket,
        "fsx_id": made.fsx_dns_name.partition(".")[0],
    }
    checked = validate_account(config(existing=existing), session.client)
    assert checked.findings == ()
    assert "permissions of the role" in checked.done
    aws.scenario(quotas={"VPCs per Region": 1, "Internet gateways per Region": 1, "EC2-VPC Elastic IPs": 1})
    assert validate_account(config(), session.client).findings == ()  # the stack has its own network


def test_credentials_that_do_not_work_are_one_error(aws: Aws) -> None:
    aws.scenario(errors=[{"service": "sts", "operation": "GetCallerIdentity", "code": "ExpiredToken", "status": 403}])
    checked = check(aws)
    assert only(checked.findings).name == "credentials"
    assert "ExpiredToken" in checked.findings[0].found
    assert checked.done == ()
    assert len(checked.skipped) == len(account_checks(config()))


def test_no_way_to_aws_is_one_error(aws: Aws) -> None:
    unreachable = Aws("http://127.0.0.1:9", aws.environment)
    checked = validate_account(config(), unreachable.client)
    assert "EndpointConnectionError" in only(checked.findings).found


def test_no_credentials_are_one_error(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    session = boto3.Session(region_name=REGION)
    checked = validate_account(config(), lambda service: session.client(service, endpoint_url=aws.endpoint))
    finding = only(checked.findings)
    assert "no AWS credentials" in finding.found
    assert "aws sts get-caller-identity" in finding.remedy


def test_an_unknown_profile_is_a_users_error(aws: Aws) -> None:
    with pytest.raises(UserError, match="no such AWS profile"):
        validate_account(config(), Session(region=REGION, profile="nobody").client)


@pytest.mark.parametrize("code", ["UnauthorizedOperation", "RequestLimitExceeded"])
def test_a_check_that_could_not_be_made_is_a_warning(place: Place, code: str) -> None:
    errors = [{"service": "ec2", "operation": "DescribeRouteTables", "code": code, "status": 403, "times": 99}]
    place.aws.scenario(errors=errors)
    checked = place.check()
    finding = only(checked.findings)
    assert (finding.verdict, finding.name) == ("warning", "existing.subnet_id")
    assert "could not check routes of the subnet" in finding.found
    assert code in finding.found
    assert ("ec2:DescribeRouteTables" in finding.remedy) == (code == "UnauthorizedOperation")
    assert "routes of the subnet" not in checked.done


def test_every_denied_service_is_reported_and_none_passes(place: Place) -> None:
    services = ("ec2", "iam", "sagemaker", "service-quotas", "fsx", "s3")
    denied = [{"service": s, "code": "AccessDenied", "status": 403, "times": 999} for s in services]
    place.aws.scenario(errors=denied)
    checked = place.check(**workers(training_plan_arn=PLAN))
    assert checked.done == ()
    assert len(checked.findings) == len(account_checks(place.config(**workers(training_plan_arn=PLAN))))
    assert {finding.verdict for finding in checked.findings} == {"warning"}


def test_other_errors_are_reported_with_their_code(place: Place) -> None:
    """Errors that do not mean an absent stack, object, bucket or file system."""
    cluster(place, "demo", 2)
    errors = [
        {"service": "cloudformation", "operation": "DescribeStacks", "code": "Throttling"},
        {"service": "fsx", "operation": "DescribeFileSystems", "code": "InternalServerError", "status": 500},
        {"service": "iam", "operation": "SimulatePrincipalPolicy", "code": "ServiceFailure", "status": 500},
        {"service": "s3", "operation": "HEAD", "code": "AccessDenied", "status": 403},
    ]
    place.aws.scenario(errors=[{**problem, "times": 99} for problem in errors])
    problems = [finding.found for finding in place.check().findings if finding.found.startswith("could not check")]
    assert len(problems) == 5  # FSx, the role's permissions, the bucket, the scripts in S3 and who may write there
    assert any("InternalServerError" in problem for problem in problems)
    problems = [finding.found for finding in check(place.aws).findings]
    assert any("Throttling" in problem for problem in problems)


def test_checks_made_pointless_by_an_offline_error_are_skipped_and_listed(place: Place) -> None:
    found = [error("workers.0.instance_type", "is none", "correct it"), error("existing.bucket", "is none", "x")]
    checked = validate_account(place.config(), clients(place.aws), found)
    assert "quotas: workers.0.instance_type is invalid" in checked.skipped
    assert "bucket: existing.bucket is invalid" in checked.skipped
    assert "security groups" in checked.done
    assert not {"quotas", "bucket", "subnet"} & set(checked.done)
    before = len(place.aws.requests())
    checked = validate_account(place.config(), clients(place.aws), [error("region", "is none", "x")])
    assert len(checked.skipped) == len(account_checks(place.config()))
    assert len(place.aws.requests()) == before
