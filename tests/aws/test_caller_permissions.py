"""The table of the caller's permissions: against the calls that commands make, the stack, and IAM's list of actions."""

import fnmatch
import json
import re
from pathlib import Path

import cfnlint
import pytest

from hyperpod_ft.aws.ssh import ssm
from hyperpod_ft.aws.stack import stack
from hyperpod_ft.aws.validation import caller_permissions
from hyperpod_ft.aws.validation.caller_permissions import COMMANDS, RESOURCE_TYPES, STACK, Permissions
from hyperpod_ft.aws.validation.validate import validate_account
from tests.aws.account_place import Place, check, clients, of, of_caller, trust
from tests.aws.conftest import ROOT, Aws
from tests.aws.world import ACCOUNT

TABLE = (*COMMANDS, caller_permissions._TAGS, *STACK, *RESOURCE_TYPES.values(), caller_permissions._FSX_FIRST)
# "Actions, resources, and condition keys for AWS services", which cfn-lint brings along
IAM = json.loads((Path(cfnlint.__file__).parent / "data" / "AdditionalSpecs" / "Policies.json").read_text())
PAGE = ROOT / "docs" / "validating-a-cluster.md"
_READS = ("Describe", "Get", "List")


def assert_permissions_of_clusters_are_listed(aws: Aws) -> None:
    """Every call to HyperPod that a command made was one of the table."""
    called = {action for action in aws.actions() if re.fullmatch("sagemaker:.*Cluster.*", action)}
    assert called - {action for row in TABLE for action in row.actions} == set()


def assert_permissions_are_listed(aws: Aws) -> None:
    """Every call was one of the table or, by `validate`, of the page's list; CloudFormation's changes too.

    The other services have roles of their own: HyperPod writes logs, FSx makes network interfaces.
    """
    listed = {action for row in TABLE for action in row.actions}
    (paragraph,) = re.findall(r"It uses these permissions: (.*?)\n\n", PAGE.read_text(), re.DOTALL)
    read = re.findall(r"`([a-z0-9]+:[A-Za-z*]+)`", paragraph)
    unlisted = {action for action in aws.actions() - listed if not any(fnmatch.fnmatch(action, one) for one in read)}
    assert unlisted == set()
    changes = {action for action in aws.actions("services") if not action.split(":")[1].startswith(_READS)}
    own = {action for action in changes if action.startswith("logs:") or action.endswith("NetworkInterface")}
    assert changes - own - listed == set()
    assert {"iam:AttachRolePolicy", "ec2:AllocateAddress"} <= changes, "they are seen"


def _kind(row: Permissions) -> str:
    """The name of the row's kind of resource in IAM's list."""
    if row.service == "s3":
        return "object" if "/" in row.resource else "bucket"
    within = row.resource.split(":", 5)[5] if row.resource.startswith("arn:") else row.resource
    return "log-stream" if ":log-stream:" in within else re.split("[/:]", within)[0]


# the actions of the extension are newer than that list
@pytest.mark.parametrize(
    "row",
    [row for row in TABLE if row != caller_permissions.EXTENSION],
    ids=lambda row: f"{row.service}-{row.resource}",
)
def test_iam_knows_the_actions_and_their_resources(row: Permissions) -> None:
    for action in row.actions:
        service, _, name = action.partition(":")
        known = IAM[service]["Actions"]
        assert name.lower() in known, action
        if row.resource != caller_permissions.SESSION_TARGET:  # HyperPod's documentation; IAM's list omits it
            kinds = known[name.lower()].get("Resources", [])
            assert (_kind(row) in kinds) if row.resource else not kinds, (action, kinds)


def test_each_type_of_the_stack_has_its_permissions() -> None:
    types = set(re.findall(r"^    Type: (AWS::\S+)$", stack.template(), re.MULTILINE))
    assert types == RESOURCE_TYPES.keys()


def test_a_new_account_needs_the_role_of_fsx(aws: Aws) -> None:
    aws.scenario(denied_actions={_caller(aws): ["iam:CreateServiceLinkedRole", "ec2:AllocateAddress"]})
    (finding,) = of(check(aws), "credentials")
    assert finding.verdict == "error"
    assert finding.found.endswith("may not ec2:AllocateAddress, iam:CreateServiceLinkedRole")
    clients(aws)("iam").create_role(
        RoleName="AWSServiceRoleForAmazonFSx", AssumeRolePolicyDocument=trust("fsx.amazonaws.com")
    )
    (finding,) = of(check(aws), "credentials")
    assert finding.found.endswith("may not ec2:AllocateAddress")


def test_what_only_later_commands_need_is_a_warning(place: Place) -> None:
    place.aws.scenario(denied_actions={_caller(place.aws): ["sagemaker:DeleteCluster", "sagemaker:AddTags"]})
    (finding,) = place.check().findings
    assert finding.verdict == "warning"
    assert "may not sagemaker:DeleteCluster, which commands after `cluster create` need" in finding.found
    denied, _ = place.check(tags={"team": "research"}).findings
    assert denied.found.endswith("may not sagemaker:AddTags")


@pytest.mark.parametrize("document", [ssm.SSH_DOCUMENT, ssm.COMMAND_DOCUMENT])
def test_sessions_with_nodes_need_documents_of_aws(place: Place, document: str) -> None:
    """Who may only start sessions with the cluster can neither use ssh nor back up the controller."""
    allow_all = {"Effect": "Allow", "Action": "*", "Resource": "*"}
    elsewhere = {"Effect": "Deny", "Action": "ssm:StartSession", "Resource": f"arn:aws:ssm:*::document/{document}"}
    iam = clients(place.aws)("iam")
    iam.create_role(RoleName="operator", AssumeRolePolicyDocument=trust("ec2.amazonaws.com"))
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allow_all, elsewhere]})
    iam.put_role_policy(RoleName="operator", PolicyName="p", PolicyDocument=policy)
    operator = of_caller(place.aws, f"arn:aws:sts::{ACCOUNT}:assumed-role/operator/me")
    (finding,) = validate_account(place.config(), operator).findings
    assert finding.verdict == "warning"
    assert "may not ssm:StartSession, which commands after `cluster create` need" in finding.found


def _caller(aws: Aws) -> str:
    name: str = clients(aws)("sts").get_caller_identity()["Arn"].rpartition("/")[2]
    return name
