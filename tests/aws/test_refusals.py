"""What AWS refuses to the credentials that a command runs with: one line names the permission and what to do."""

from pathlib import Path
from typing import TYPE_CHECKING

from tests.aws import training_run
from tests.aws.kit import NAME, Kit
from tests.aws.training_command import Command
from tests.aws.training_run import Jobs

if TYPE_CHECKING:
    from tests.aws.conftest import Aws

USER = "User: arn:aws:iam::123456789012:user/me is not authorized to perform:"


def refuse(aws: "Aws", service: str, operation: str, action: str) -> None:
    denied = {"code": "AccessDeniedException", "message": f"{USER} {action} on resource: x", "status": 403}
    aws.scenario(errors=[{"service": service, "operation": operation, **denied}])


def test_create_names_the_permission_and_continues_with_it(kit: Kit) -> None:
    for operation, action in (
        ("CreateStack", "cloudformation:CreateStack"),
        ("CreateCluster", "sagemaker:CreateCluster"),
        ("CreateCluster", "iam:PassRole"),
    ):
        refuse(kit.aws, "cloudformation" if operation == "CreateStack" else "sagemaker", operation, action)
        refusal = kit.run("create", status=2).splitlines()[-1]
        assert f"access denied to {action} " in refusal
        assert refusal.endswith(f"grant these credentials {action}")
    assert "is complete" in kit.run("create")


def test_create_names_the_permission_that_a_resource_of_the_stack_lacks(kit: Kit) -> None:
    """CloudFormation acts with the same credentials. EC2 adds thousands of letters that only it can decode."""
    reason = f"API: ec2:AllocateAddress {USER} ec2:AllocateAddress. Encoded authorization failure message: "
    kit.aws.scenario(fail_resources={"AWS::EC2::EIP": reason + 3000 * "x"})
    refusal = kit.run("create", status=2).splitlines()[-1]
    assert "ElasticIp (AWS::EC2::EIP): API: ec2:AllocateAddress" in refusal
    assert "hyperpod-ft cluster delete" in refusal
    assert len(refusal) < 1000
    kit.aws.scenario(fail_resources={"AWS::EC2::EIP": ""})
    kit.run("delete", "--confirm", NAME)
    assert "is complete" in kit.run("create")


def test_submit_names_the_permission(aws: "Aws", tmp_path: Path) -> None:
    command = Command(tmp_path, aws, training_run.values(tmp_path / "root", Jobs(aws).section))
    refuse(aws, "sagemaker", "CreateTrainingJob", "iam:PassRole")
    refusal = command.run("submit", "run.yaml", "--launcher", "sagemaker", status=2).splitlines()[-1]
    assert "access denied to iam:PassRole " in refusal
    assert refusal.endswith("grant these credentials iam:PassRole")
    assert command.jobs() == []


def test_an_image_is_looked_at_before_anything_is_uploaded(aws: "Aws", tmp_path: Path) -> None:
    """One that does not exist is refused; where these credentials may not look, a warning says so."""
    jobs = Jobs(aws)
    values = training_run.values(tmp_path / "root", jobs.section)
    own = "123456789012.dkr.ecr.us-west-2.amazonaws.com/own:9"
    values["sagemaker"]["image"] = own
    command = Command(tmp_path, aws, values)
    submit = ("submit", "run.yaml", "--launcher", "sagemaker")
    refusal = command.run(*submit, status=2).splitlines()[-1]
    assert refusal.endswith(f"sagemaker.image: no image {own}; set sagemaker.image to the URI of one that exists")
    assert "Contents" not in aws.client("s3").list_objects_v2(Bucket=jobs.bucket)
    refuse(aws, "ecr", "BatchGetImage", "ecr:BatchGetImage")
    output = command.run(
        *submit, "--only", "env", "--set", "sagemaker.role=arn:aws:iam::123456789012:role/none", status=2
    )
    assert "warning: sagemaker.image: could not check the images: access denied to ecr:BatchGetImage" in output
    assert "Contents" in aws.client("s3").list_objects_v2(Bucket=jobs.bucket)
    assert command.jobs() == []
