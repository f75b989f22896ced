"""Checks that the nodes' role and the caller have the permissions they need, by IAM's policy simulator.

Without permission to simulate, the role's policies are read, and only actions that no statement allows are reported.
"""

import fnmatch
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ft.aws.session import DENIED, error_code
from hyperpod_ft.aws.validation.check_input import CheckInput
from hyperpod_ft.findings import Finding, error, warning

ROLE, CALLER = "existing.execution_role_arn", "credentials"
_SERVICE = "sagemaker.amazonaws.com"


@dataclass(frozen=True)
class Need:
    """Actions on one resource. `context`: the request's context keys, for conditions of policies."""

    actions: tuple[str, ...]
    resource: str = "*"
    context: dict[str, str] = field(default_factory=dict)


def role_needs(given: CheckInput) -> list[Need]:
    """The permissions of AmazonSageMakerClusterInstanceRolePolicy, and those that AWS adds for a customer's VPC ("IAM
    role for SageMaker HyperPod")."""
    arn_of = f"arn:{given.partition}:{{}}:{given.config.region}:{given.account_id}"
    logs = f"{arn_of.format('logs')}:log-group:/aws/sagemaker/Clusters/{given.config.name}/0123456789ab"
    bucket = f"arn:{given.partition}:s3:::{given.existing.bucket}"
    interface = f"{arn_of.format('ec2')}:network-interface/eni-0123456789abcdef0"
    network = [f"{arn_of.format('ec2')}:subnet/{given.existing.subnet_id}"]
    network += [f"{arn_of.format('ec2')}:security-group/{group}" for group in given.existing.security_group_ids]
    # the managed policy's condition on S3: buckets of the same account
    own = {"aws:ResourceAccount": given.account_id, "aws:PrincipalAccount": given.account_id}
    database = given.config.accounting_database
    vpc_id = (given.subnet() or {"VpcId": "vpc-0123456789abcdef0"})["VpcId"]
    return [
        Need(("logs:CreateLogGroup",), logs),
        Need(("logs:PutLogEvents", "logs:CreateLogStream", "logs:DescribeLogStreams"), f"{logs}:log-stream:x"),
        Need(("cloudwatch:PutMetricData",), "*", {"cloudwatch:namespace": "/aws/sagemaker/Clusters"}),
        Need(("s3:ListBucket",), bucket, own),
        Need(("s3:GetObject",), f"{bucket}/lifecycle/provision.sh", own),
        Need(
            (
                "ssmmessages:CreateControlChannel",
                "ssmmessages:CreateDataChannel",
                "ssmmessages:OpenControlChannel",
                "ssmmessages:OpenDataChannel",
            )
        ),
        # on each resource that the action uses: policies may name them one by one
        *(Need(("ec2:CreateNetworkInterface",), touched) for touched in (interface, *network)),
        Need(
            (
                "ec2:CreateNetworkInterfacePermission",
                "ec2:DeleteNetworkInterface",
                "ec2:DeleteNetworkInterfacePermission",
                "ec2:DetachNetworkInterface",
            ),
            interface,
            {"ec2:Vpc": f"{arn_of.format('ec2')}:vpc/{vpc_id}"},
        ),
        Need(("ec2:CreateTags",), interface),
        Need(
            (
                "ec2:DescribeNetworkInterfaces",
                "ec2:DescribeVpcs",
                "ec2:DescribeDhcpOptions",
                "ec2:DescribeSubnets",
                "ec2:DescribeSecurityGroups",
            )
        ),
        *(Need(("kms:CreateGrant", "kms:DescribeKey"), key) for key in (given.config.kms_keys.volumes,) if key),
        *([Need(("secretsmanager:GetSecretValue",), database.secret_arn)] if database else []),
    ]


def role_is_assumable(given: CheckInput) -> list[Finding]:
    """The role exists, is in this account, and SageMaker may assume it."""
    return assumable(given.clients["iam"], given.existing.execution_role_arn, given.account_id, ROLE)


def assumable(iam: Any, arn: str, account_id: str, key: str) -> list[Finding]:
    """The role that `key` names exists, is in this account, and SageMaker may assume it."""
    if (of := arn.split(":")[4]) != account_id:
        return [
            error(key, f"{arn} is in account {of}, your credentials in {account_id}", "name a role of your account")
        ]
    try:
        found = iam.get_role(RoleName=_name(arn))["Role"]
    except iam.exceptions.NoSuchEntityException:
        return [error(key, f"no role {_name(arn)} in account {account_id}", "correct the ARN")]
    if found["Arn"] != arn:
        return [error(key, f"the role {_name(arn)} is {found['Arn']}, not {arn}", "correct the ARN")]
    if any(_trusts_sagemaker(statement) for statement in _statements(found["AssumeRolePolicyDocument"])):
        return []
    return [
        error(
            key,
            f"{_name(arn)} does not trust {_SERVICE}",
            f"allow it: aws iam update-assume-role-policy --role-name {_name(arn)}, with Principal Service {_SERVICE}"
            " and Action sts:AssumeRole",
        )
    ]


def role_permissions(given: CheckInput) -> list[Finding]:
    """The role has the permissions that HyperPod's nodes need."""
    remedy = "attach AmazonSageMakerClusterInstanceRolePolicy and AWS's additions for a VPC, or allow these actions"
    return check_role_has(given, role_needs(given), remedy)


def check_role_has(given: CheckInput, needs: list[Need], remedy: str) -> list[Finding]:
    """The role has these permissions."""
    arn, iam = given.existing.execution_role_arn, given.clients["iam"]
    try:
        return _findings(ROLE, _name(arn), denied(iam, arn, needs), remedy)
    except iam.exceptions.NoSuchEntityException:
        return []  # reported by `role`
    except iam.exceptions.ClientError as problem:
        if error_code(problem) not in DENIED:
            raise
        allowed = list(_allowed_actions(iam, _name(arn)))
        lacking = [a for need in needs for a in need.actions if not any(_matches(a, pattern) for pattern in allowed)]
        if lacking := list(dict.fromkeys(lacking)):
            return [error(ROLE, f"{_name(arn)} may not {', '.join(lacking)}", remedy)]
        unseen = f"could not check on which resources {_name(arn)} may act: AWS answered {error_code(problem)}"
        return [warning(ROLE, unseen, "grant yourself iam:SimulatePrincipalPolicy")]


def check_caller_has(given: CheckInput, needs: list[Need], later: Collection[str] = ()) -> list[Finding]:
    """The caller has these permissions; without those of `later`, only other commands fail."""
    iam, caller = given.clients["iam"], given.caller
    kind, _, name = caller.split(":", 5)[5].partition("/")
    if kind == "root":
        return []
    if kind == "assumed-role":
        caller = iam.get_role(RoleName=name.partition("/")[0])["Role"]["Arn"]
    elif kind != "user":
        return [
            warning(
                CALLER, f"could not check what {given.caller} may do", "make sure that it has the permissions it needs"
            )
        ]
    lacking = denied(iam, caller, needs)
    return _findings(CALLER, given.caller, lacking, "ask for these permissions, or use other credentials", later)


def _findings(
    field: str, who: str, denied: Iterable[tuple[str, list[str]]], remedy: str, later: Collection[str] = ()
) -> list[Finding]:
    """An error for denied actions, a warning for those of `later` and those that depend on context keys unknown to the
    simulation."""
    lacking: list[str] = []
    unusable: list[str] = []
    depends: list[str] = []
    for action, unknown in denied:
        found, text = (depends, f"{action} ({', '.join(unknown)})") if unknown else (lacking, action)
        if action in later and not unknown:
            found = unusable
        if text not in found:
            found.append(text)
    findings = [error(field, f"{who} may not {', '.join(lacking)}", remedy)] if lacking else []
    if unusable:
        problem = f"{who} may not {', '.join(unusable)}, which commands after `cluster create` need"
        findings.append(warning(field, problem, remedy))
    if depends:
        problem = f"could not check {who} for {', '.join(depends)}: that depends on the context keys in brackets"
        findings.append(warning(field, problem, "check the conditions of its policies"))
    return findings


def denied(iam: Any, arn: str, needs: Iterable[Need]) -> Iterator[tuple[str, list[str]]]:
    """The actions that IAM's simulator denies, with the context keys that policies require beyond `Need.context`.

    Raises ClientError.
    """
    for need in needs:
        pages = iam.get_paginator("simulate_principal_policy").paginate(
            PolicySourceArn=arn,
            ActionNames=list(need.actions),
            ResourceArns=[need.resource],
            ContextEntries=[
                {"ContextKeyName": key, "ContextKeyValues": [value], "ContextKeyType": "string"}
                for key, value in need.context.items()
            ],
        )
        for page in pages:
            for result in page["EvaluationResults"]:
                if result["EvalDecision"] != "allowed":
                    yield result["EvalActionName"], result.get("MissingContextValues", [])


def _allowed_actions(iam: Any, role_name: str) -> Iterator[str]:
    """The Action patterns of every Allow statement of a role, regardless of resources and conditions."""
    for page in iam.get_paginator("list_attached_role_policies").paginate(RoleName=role_name):
        for attached in page["AttachedPolicies"]:
            version = iam.get_policy(PolicyArn=attached["PolicyArn"])["Policy"]["DefaultVersionId"]
            policy = iam.get_policy_version(PolicyArn=attached["PolicyArn"], VersionId=version)["PolicyVersion"]
            yield from _allowed(policy["Document"])
    for page in iam.get_paginator("list_role_policies").paginate(RoleName=role_name):
        for name in page["PolicyNames"]:
            yield from _allowed(iam.get_role_policy(RoleName=role_name, PolicyName=name)["PolicyDocument"])


def _allowed(document: dict[str, Any]) -> Iterator[str]:
    for statement in _statements(document):
        if statement.get("Effect") == "Allow":
            yield from _listed(statement.get("Action", []))


def _trusts_sagemaker(statement: dict[str, Any]) -> bool:
    principal = statement.get("Principal", {})
    services = _listed(principal.get("Service", [])) if isinstance(principal, dict) else []
    return (
        statement.get("Effect") == "Allow"
        and any(_matches("sts:AssumeRole", action) for action in _listed(statement.get("Action", [])))
        and _SERVICE in services
    )


def _statements(document: dict[str, Any]) -> list[dict[str, Any]]:
    return _listed(document.get("Statement", []))


def _matches(action: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(action.lower(), pattern.lower())


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _name(arn: str) -> str:
    return arn.rpartition("/")[2]
