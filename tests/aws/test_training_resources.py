"""The stack of training jobs by the commands of `hyperpod-ft sagemaker`, on the stand-in for AWS."""

import json

import cfnlint.api
import pytest
import yaml

from hyperpod_ft.aws import stacks
from hyperpod_ft.config.instances import CATALOGUE
from hyperpod_ft.config.sections.sagemaker import SageMaker
from hyperpod_ft.errors import UserError
from hyperpod_ft.sagemaker.cli.setup import STACK
from hyperpod_ft.sagemaker.resources import TrainingResources, delete, deploy, template
from hyperpod_ft.sagemaker.section import RUN_TAG
from tests.aws.account_place import allowed
from tests.aws.conftest import REGION, Aws, kit_session
from tests.aws.kit import Kit
from tests.aws.world import ACCOUNT

_TYPES = "sagemaker:InstanceTypes"


def quiet(_: str) -> None: ...


def made(file_system: bool = False) -> TrainingResources:
    return deploy(kit_session(), quiet, name=STACK, file_system=file_system)


def test_the_template_is_clean() -> None:
    assert [str(match) for match in cfnlint.api.lint(template(), regions=[REGION])] == []


def test_it_is_deployed_once_and_again(aws: Aws) -> None:
    first = made()
    assert made() == first
    SageMaker(region=first.region, role=first.role_arn, store=f"s3://{first.bucket}/ft")
    with pytest.raises(UserError, match="not created by this kit"):
        aws.client("cloudformation").create_stack(
            StackName="other", TemplateBody='{"Resources": {"B": {"Type": "AWS::S3::Bucket", "Properties": {}}}}'
        )
        deploy(kit_session(), quiet, name="other")


def test_the_role_may_do_what_containers_do_and_no_more(aws: Aws) -> None:
    found = made()
    role, where = found.role_arn, f"{REGION}:{ACCOUNT}"
    jobs = f"arn:aws:sagemaker:{where}:training-job/x"
    for action, resource in (
        ("s3:PutObject", f"arn:aws:s3:::{found.bucket}/ft/runs/x"),
        ("s3:ListBucket", f"arn:aws:s3:::{found.bucket}"),
        ("ecr:BatchGetImage", f"arn:aws:ecr:{REGION}:763104351884:repository/pytorch"),
        ("logs:PutLogEvents", f"arn:aws:logs:{where}:log-group:/aws/sagemaker/TrainingJobs:log-stream:x/algo-1-1"),
        ("sagemaker:DescribeTrainingJob", jobs),
    ):
        assert allowed(aws, role, action, resource), action
    assert allowed(aws, role, "iam:PassRole", role, **{"iam:PassedToService": "sagemaker.amazonaws.com"})
    for action, resource in (
        ("s3:GetObject", "arn:aws:s3:::another-bucket/x"),
        ("s3:DeleteBucket", f"arn:aws:s3:::{found.bucket}"),
        ("sagemaker:CreateEndpoint", "*"),
        ("sagemaker:StopTrainingJob", jobs),
        ("sagemaker:AddTags", jobs),
        *(
            (action, f"arn:aws:s3:::{found.bucket}/{store}code/hyperpod-ft-0.1.0-{'a' * 32}/{file}")
            for action in ("s3:PutObject", "s3:DeleteObject", "s3:PutObjectAcl")
            for store in ("", "hyperpod-ft/", "team/a/")
            for file in ("entry.py", "os.py")
        ),
        ("ec2:CreateNetworkInterface", "*"),
        ("logs:PutLogEvents", f"arn:aws:logs:{where}:log-group:/other:log-stream:x"),
    ):
        assert not allowed(aws, role, action, resource), action
    assert not allowed(aws, role, "iam:PassRole", role, **{"iam:PassedToService": "ec2.amazonaws.com"})
    other = f"arn:aws:iam::{ACCOUNT}:role/admin"
    assert not allowed(aws, role, "iam:PassRole", other, **{"iam:PassedToService": "sagemaker.amazonaws.com"})
    shown = aws.client("iam").get_role(RoleName=role.rpartition("/")[2])["Role"]
    (trust,) = shown["AssumeRolePolicyDocument"]["Statement"]
    assert trust["Condition"] == {"StringEqualsIfExists": {"aws:SourceAccount": ACCOUNT}}


def test_the_role_creates_only_jobs_of_runs_on_types_that_the_kit_knows(aws: Aws) -> None:
    role, job = made().role_arn, f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job/x"

    def may(tag: str, instance_type: str) -> bool:
        context = {key: value for key, value in ((f"aws:RequestTag/{RUN_TAG}", tag), (_TYPES, instance_type)) if value}
        return allowed(aws, role, "sagemaker:CreateTrainingJob", job, **context)

    for instance_type in set(CATALOGUE) - {"local"}:
        assert may("name/0123456789ab", f"ml.{instance_type}"), instance_type
    assert not may("", "ml.p5.48xlarge") and not may("anything", "ml.p5.48xlarge")
    assert not may("name/0123456789ab", "ml.r7i.48xlarge") and not may("name/0123456789ab", "")
    assert allowed(aws, role, "sagemaker:AddTags", job, **{"sagemaker:TaggingAction": "CreateTrainingJob"})
    assert not allowed(aws, role, "sagemaker:AddTags", job, **{"sagemaker:TaggingAction": "CreateEndpoint"})


def test_a_file_system_adds_the_network_and_it_stays(aws: Aws) -> None:
    role = made().role_arn
    assert made(file_system=True).role_arn == role
    assert allowed(aws, role, "ec2:CreateNetworkInterface")
    made()
    assert allowed(aws, role, "ec2:CreateNetworkInterface")


def test_whoever_asks_is_mailed_about_the_roles_jobs(aws: Aws) -> None:
    sns, events = aws.client("sns"), aws.client("events")

    def told() -> list[str]:
        return [one["Endpoint"] for one in sns.list_subscriptions()["Subscriptions"]]

    role = made().role_arn
    for address in ("me@example.com", "team@example.com"):
        deploy(kit_session(), quiet, name=STACK, mail=address)
        assert made().role_arn == role and told() == [address], "and it stays"
    (rule,) = events.list_rules()["Rules"]
    (topic,) = (one["TopicArn"] for one in sns.list_topics()["Topics"])
    detail = json.loads(rule["EventPattern"])["detail"]
    assert detail == {"RoleArn": [role], "TrainingJobStatus": ["Failed", "Stopped"]}
    assert [target["Arn"] for target in events.list_targets_by_rule(Rule=rule["Name"])["Targets"]] == [topic]
    policy = json.loads(sns.get_topic_attributes(TopicArn=topic)["Attributes"]["Policy"])
    assert policy["Statement"][0]["Condition"] == {"ArnEquals": {"aws:SourceArn": rule["Arn"]}}
    with pytest.raises(UserError, match="Mail"):
        deploy(kit_session(), quiet, name=STACK, mail="nobody")
    deploy(kit_session(), quiet, name=STACK, mail="")
    assert (told(), events.list_rules()["Rules"]) == ([], [])


def test_deleting_keeps_the_bucket_unless_asked(aws: Aws) -> None:
    found = made()
    aws.client("s3").put_object(Bucket=found.bucket, Key="ft/x", Body=b"12")
    left = delete(kit_session(), quiet, name=STACK)
    assert left is not None
    assert (left.name, left.objects, left.bytes) == (found.bucket, 1, 2)
    assert delete(kit_session(), quiet, name=STACK) is None
    again = made()
    aws.client("s3").put_object(Bucket=again.bucket, Key="ft/x", Body=b"12")
    assert delete(kit_session(), quiet, name=STACK, delete_data=True) is None
    names = [bucket["Name"] for bucket in aws.client("s3").list_buckets()["Buckets"]]
    assert names == [found.bucket]


def test_a_stack_of_somebody_else_is_left_alone(aws: Aws) -> None:
    """Even with a parameter and a bucket of the same names."""
    text = template().replace("of hyperpod-ft need", "of our own need")
    parameters = [{"ParameterKey": "FileSystem", "ParameterValue": "false"}]
    aws.client("cloudformation").create_stack(
        StackName=STACK, TemplateBody=text, Parameters=parameters, Capabilities=["CAPABILITY_IAM"]
    )
    with pytest.raises(UserError, match="was not created by this kit"):
        delete(kit_session(), quiet, name=STACK, delete_data=True)
    with pytest.raises(UserError, match="was not created by this kit"):
        made()


def test_a_failed_stack_says_why_and_what_to_do(aws: Aws) -> None:
    aws.scenario(fail_resources={"AWS::IAM::Role": "not authorized to perform iam:CreateRole"})
    with pytest.raises(UserError, match=r"ExecutionRole.*iam:CreateRole.*hyperpod-ft sagemaker delete"):
        made()
    aws.scenario(fail_resources={"AWS::IAM::Role": ""})
    delete(kit_session(), quiet, name=STACK)


def test_an_update_that_was_rolled_back_is_an_error(aws: Aws) -> None:
    iam, role = aws.client("iam"), made().role_arn.rpartition("/")[2]
    for policy in iam.list_role_policies(RoleName=role)["PolicyNames"]:
        iam.delete_role_policy(RoleName=role, PolicyName=policy)
    iam.delete_role(RoleName=role)
    for _ in range(2):
        with pytest.raises(UserError, match=r"UPDATE_ROLLBACK_COMPLETE: ExecutionRole .*; nothing has changed"):
            made(file_system=True)


def test_a_change_set_that_was_not_executed_is_not_waited_for(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    aws.client("cloudformation").create_change_set(
        StackName=STACK,
        ChangeSetName="x",
        ChangeSetType="CREATE",
        TemplateBody=template(),
        Parameters=[{"ParameterKey": "FileSystem", "ParameterValue": "false"}],
        Capabilities=["CAPABILITY_IAM"],
    )
    with monkeypatch.context() as impatient:
        impatient.setattr(stacks, "DEADLINE_SECONDS", 5.0)
        with pytest.raises(UserError, match=r"REVIEW_IN_PROGRESS.*hyperpod-ft sagemaker delete"):
            made()
    assert delete(kit_session(), quiet, name=STACK) is None
    made()


def test_the_commands(kit: Kit) -> None:
    assert kit.run_any("sagemaker", "setup", "--print") == template()
    output = kit.run_any("sagemaker", "setup", "--region", REGION, "--mail", "me@example.com")
    assert "AWS asks me@example.com to confirm" in output
    section = yaml.safe_load(output.partition("For the run file:")[2])["sagemaker"]
    assert SageMaker(**section).region == REGION
    assert "not deleted" in kit.run_any("sagemaker", "delete", "--confirm", "x", "--region", REGION, status=2)
    output = kit.run_any("sagemaker", "delete", "--confirm", STACK, "--region", REGION)
    assert f"billed by its size: {section['store'].removesuffix('/hyperpod-ft')}" in output
