"""The nodes' role: what IAM allows it."""

import json

import pytest

from hyperpod_ft.cluster.stack.stack import deploy
from hyperpod_ft.cluster.validation.check_input import ROLE
from tests.aws.account_place import ROLE_ACTIONS, Place, allow, allowed, clients, config, of, only, trust
from tests.aws.conftest import REGION, kit_session
from tests.aws.world import ACCOUNT


def test_a_role_that_is_not_there_or_of_another_account(place: Place) -> None:
    role = f"arn:aws:iam::{ACCOUNT}:role/nobody"
    assert "no role nobody" in only(place.check({"execution_role_arn": role}).findings).found
    role = "arn:aws:iam::999999999999:role/hyperpod"
    assert "is in account 999999999999" in place.check({"execution_role_arn": role}).findings[0].found
    path = place.role.replace("role/", "role/elsewhere/")
    assert "not arn" in of(place.check({"execution_role_arn": path}), "existing.execution_role_arn")[0].found


@pytest.mark.parametrize(("service", "trusted"), [("ec2.amazonaws.com", False), ("sagemaker.amazonaws.com", True)])
def test_a_role_that_sagemaker_may_not_take_on(place: Place, service: str, trusted: bool) -> None:
    iam = clients(place.aws)("iam")
    role = iam.create_role(RoleName="other", AssumeRolePolicyDocument=trust(service))["Role"]["Arn"]
    allow(iam, "other", *ROLE_ACTIONS)
    findings = place.check({"execution_role_arn": role}).findings
    if trusted:
        assert findings == ()
    else:
        assert "does not trust sagemaker.amazonaws.com" in only(findings).found


def test_permissions_that_the_role_lacks(place: Place) -> None:
    place.aws.scenario(denied_actions={"hyperpod": ["ec2:CreateNetworkInterface", "s3:*"]})
    finding = only(place.check().findings)
    assert (finding.verdict, finding.name) == ("error", "existing.execution_role_arn")
    assert "may not s3:ListBucket, s3:GetObject, ec2:CreateNetworkInterface" in finding.found


def test_the_role_reads_the_secret_of_an_accounting_database(place: Place) -> None:
    secret, other = (f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:{name}" for name in ("jobs-AbCdEf", "x-AbCdEf"))
    database = {"endpoint": "jobs.c1.us-west-2.rds.amazonaws.com", "secret_arn": secret}
    rds = {"accounting": "rds", "accounting_database": database}
    assert only(of(place.check(**rds), ROLE)).found.endswith("hyperpod may not secretsmanager:GetSecretValue")
    allow(clients(place.aws)("iam"), "hyperpod", *ROLE_ACTIONS, "secretsmanager:GetSecretValue")
    assert of(place.check(**rds), ROLE) == []

    resources = deploy(kit_session(), config(**rds))
    read = "secretsmanager:GetSecretValue"
    assert [allowed(place.aws, resources.role_arn, read, arn) for arn in (secret, other)] == [True, False]


def test_what_depends_on_more_than_the_simulation_knows_is_a_warning(place: Place) -> None:
    place.aws.scenario(denied_actions={"hyperpod": ["ec2:CreateTags?aws:RequestTag/team", "s3:GetObject"]})
    lacking, depends = place.check().findings
    assert (lacking.verdict, depends.verdict) == ("error", "warning")
    assert lacking.found.endswith("may not s3:GetObject")
    assert "ec2:CreateTags (aws:RequestTag/team)" in depends.found


def test_where_the_simulation_is_denied_a_warning_names_the_permission(place: Place) -> None:
    denied = {"service": "iam", "operation": "SimulatePrincipalPolicy", "code": "AccessDenied", "status": 403}
    place.aws.scenario(errors=[{**denied, "times": 999}])
    found = of(place.check(), "existing.execution_role_arn")
    assert {finding.verdict for finding in found} == {"warning"}
    assert any("could not check permissions of the role" in finding.found for finding in found)
    assert all("iam:SimulatePrincipalPolicy" in finding.remedy for finding in found)


def test_policies_that_name_other_resources(place: Place) -> None:
    elsewhere = ["arn:aws:s3:::sagemaker-theirs", "arn:aws:s3:::sagemaker-theirs/*"]
    iam = clients(place.aws)("iam")
    allow(iam, "hyperpod", *(action for action in ROLE_ACTIONS if not action.startswith("s3:")))
    statement = {"Effect": "Allow", "Action": "s3:*", "Resource": elsewhere}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    iam.put_role_policy(RoleName="hyperpod", PolicyName="bucket", PolicyDocument=policy)
    assert only(place.check().findings).found.endswith("may not s3:ListBucket, s3:GetObject")
