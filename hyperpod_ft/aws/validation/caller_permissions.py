"""The permissions that the caller of `hyperpod-ft cluster` needs, in one table.

Tests hold it against the calls of the commands, the resources of the stack, and IAM's own list of actions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from hyperpod_ft.aws.session import error_code
from hyperpod_ft.aws.validation.check_input import CheckInput
from hyperpod_ft.aws.validation.permission_checks import Need, check_caller_has
from hyperpod_ft.findings import Finding

_FSX_ROLE = "AWSServiceRoleForAmazonFSx"


@dataclass(frozen=True)
class Permissions:
    """Actions of one service on one resource. `create`: of `cluster create`; `later`: of the other commands."""

    service: str
    resource: str  # the end of its ARN, or a whole one, with fields of `_arn`; empty where IAM knows no resource
    create: str = ""
    later: str = ""

    @property
    def actions(self) -> tuple[str, ...]:
        return tuple(f"{self.service}:{name}" for name in f"{self.create} {self.later}".split())


SESSION_TARGET = "arn:{partition}:sagemaker:{region}:{account}:cluster/0123456789ab"
EXTENSION = Permissions(
    *("sagemaker", "cluster/0123456789ab"),
    later="CreateClusterExtension UpdateClusterExtension DeleteClusterExtension DescribeClusterExtension"
    " ListClusterExtensions",
)
COMMANDS = (
    Permissions(
        *("sagemaker", "cluster/0123456789ab", "CreateCluster DescribeCluster ListClusterNodes"),
        "UpdateCluster UpdateClusterSoftware BatchAddClusterNodes BatchRebootClusterNodes BatchReplaceClusterNodes"
        " BatchDeleteClusterNodes DeleteCluster ListClusterEvents DescribeClusterEvent",
    ),
    EXTENSION,
    Permissions("sagemaker", "", "ListClusters"),
    Permissions("iam", "role/{role}", "PassRole"),
    Permissions("s3", "{bucket}", "ListBucket"),
    Permissions("s3", "{bucket}/lifecycle/provision.sh", "PutObject", later="DeleteObject"),
    Permissions("logs", "log-group:/aws/sagemaker/Clusters/{name}/0123456789ab", later="DescribeLogStreams"),
    Permissions("logs", "log-group:/aws/sagemaker/Clusters/{name}/0123456789ab:log-stream:x", later="GetLogEvents"),
    Permissions("ssm", SESSION_TARGET, later="StartSession"),
    Permissions("ssm", "arn:{partition}:ssm:{region}::document/AWS-StartSSHSession", later="StartSession"),
    Permissions("ssm", "arn:{partition}:ssm:{region}::document/AWS-StartNonInteractiveCommand", later="StartSession"),
)
_TAGS = Permissions("sagemaker", "cluster/0123456789ab", "AddTags")
STACK = (
    Permissions(
        *("cloudformation", "stack/{stack}/0", "CreateStack DescribeStacks DescribeStackEvents UpdateStack"),
        "ListStackResources DeleteStack",
    ),
    Permissions(
        "ec2",
        "",
        "DescribeVpcs DescribeSubnets DescribeInternetGateways DescribeRouteTables DescribeAddresses"
        " DescribeNatGateways DescribeVpcEndpoints DescribeSecurityGroups",
    ),
    Permissions("fsx", "", "DescribeFileSystems"),
    Permissions("s3", "{bucket}", later="ListBucketVersions"),
    Permissions("s3", "{bucket}/x", later="DeleteObject DeleteObjectVersion"),
)
_FSX_FIRST = Permissions("iam", f"role/aws-service-role/fsx.amazonaws.com/{_FSX_ROLE}", "CreateServiceLinkedRole")
# CloudFormation acts with the caller's permissions.
RESOURCE_TYPES = {
    "AWS::EC2::VPC": Permissions("ec2", "vpc/vpc-0", "CreateVpc ModifyVpcAttribute CreateTags", "DeleteVpc"),
    "AWS::EC2::Subnet": Permissions(
        "ec2", "subnet/subnet-0", "CreateSubnet ModifySubnetAttribute CreateTags", "DeleteSubnet"
    ),
    "AWS::EC2::InternetGateway": Permissions(
        "ec2", "internet-gateway/igw-0", "CreateInternetGateway CreateTags", "DeleteInternetGateway"
    ),
    "AWS::EC2::VPCGatewayAttachment": Permissions(
        "ec2", "internet-gateway/igw-0", "AttachInternetGateway", "DetachInternetGateway"
    ),
    "AWS::EC2::RouteTable": Permissions("ec2", "route-table/rtb-0", "CreateRouteTable CreateTags", "DeleteRouteTable"),
    "AWS::EC2::Route": Permissions("ec2", "route-table/rtb-0", "CreateRoute", "DeleteRoute"),
    "AWS::EC2::SubnetRouteTableAssociation": Permissions(
        "ec2", "route-table/rtb-0", "AssociateRouteTable", "DisassociateRouteTable"
    ),
    "AWS::EC2::EIP": Permissions("ec2", "elastic-ip/eipalloc-0", "AllocateAddress CreateTags", "ReleaseAddress"),
    "AWS::EC2::NatGateway": Permissions("ec2", "natgateway/nat-0", "CreateNatGateway CreateTags", "DeleteNatGateway"),
    "AWS::EC2::VPCEndpoint": Permissions("ec2", "vpc-endpoint/vpce-0", "CreateVpcEndpoint", "DeleteVpcEndpoints"),
    "AWS::EC2::SecurityGroup": Permissions(
        *("ec2", "security-group/sg-0", "CreateSecurityGroup CreateTags"),
        "DeleteSecurityGroup",
    ),
    "AWS::EC2::SecurityGroupIngress": Permissions(
        "ec2", "security-group/sg-0", "AuthorizeSecurityGroupIngress", "RevokeSecurityGroupIngress"
    ),
    "AWS::EC2::SecurityGroupEgress": Permissions(  # a new group has a rule for all traffic out, which is replaced
        "ec2", "security-group/sg-0", "AuthorizeSecurityGroupEgress RevokeSecurityGroupEgress"
    ),
    "AWS::FSx::FileSystem": Permissions(
        *("fsx", "file-system/fs-0123456789abcdef0", "CreateFileSystem TagResource"),
        "UpdateFileSystem DeleteFileSystem",
    ),
    "AWS::S3::Bucket": Permissions(
        *("s3", "{bucket}"),
        "CreateBucket PutEncryptionConfiguration PutBucketPublicAccessBlock PutBucketOwnershipControls"
        " PutLifecycleConfiguration PutBucketTagging",
        "DeleteBucket",
    ),
    "AWS::S3::BucketPolicy": Permissions("s3", "{bucket}", "GetBucketPolicy PutBucketPolicy", "DeleteBucketPolicy"),
    "AWS::IAM::Role": Permissions(
        *("iam", "role/{role}", "CreateRole GetRole TagRole AttachRolePolicy PutRolePolicy"),
        "DetachRolePolicy DeleteRolePolicy DeleteRole",
    ),
}


def rows(given: CheckInput) -> Iterator[Permissions]:
    """The rows that apply to a cluster file."""
    yield from COMMANDS
    if given.config.tags:
        yield _TAGS
    if given.config.existing is None:
        yield from STACK
        yield from RESOURCE_TYPES.values()
        if not _has_fsx_role(given):
            yield _FSX_FIRST
    if key := given.config.kms_keys.fsx:
        yield Permissions("kms", key, "CreateGrant DescribeKey")
    if key := given.config.kms_keys.bucket:
        yield Permissions("kms", key, "GenerateDataKey")


def caller_permissions(given: CheckInput) -> list[Finding]:
    """The caller has these permissions; those that `create` does not need are warnings."""
    applying = list(rows(given))
    actions: dict[str, dict[str, None]] = {}
    for row in applying:
        actions.setdefault(_arn(given, row), {}).update(dict.fromkeys(row.actions))
    needs = [Need(tuple(names), arn, _CONTEXT) for arn, names in actions.items()]
    created = {f"{row.service}:{name}" for row in applying for name in row.create.split()}
    return check_caller_has(given, needs, {name for row in applying for name in row.actions} - created)


_CONTEXT = {"iam:PassedToService": "sagemaker.amazonaws.com", "iam:AWSServiceName": "fsx.amazonaws.com"}


def _arn(given: CheckInput, row: Permissions) -> str:
    if not row.resource:
        return "*"
    existing, name = given.config.existing, given.config.stack_name
    resource = row.resource.format(
        name=given.config.name,
        partition=given.partition,
        region=given.config.region,
        account=given.account_id,
        stack=name,
        bucket=existing.bucket if existing else "sagemaker-hyperpod-0123456789ab",
        role=existing.execution_role_arn.partition("/")[2] if existing else f"{name}-ExecutionRole-0123456789AB",
    )
    if resource.startswith("arn:"):
        return resource
    where = {"s3": ":", "iam": f":{given.account_id}"}.get(row.service, f"{given.config.region}:{given.account_id}")
    return f"arn:{given.partition}:{row.service}:{where}:{resource}"


def _has_fsx_role(given: CheckInput) -> bool:
    """Whether FSx has its service-linked role, which the first file system of an account creates."""
    iam = given.clients["iam"]
    try:
        iam.get_role(RoleName=_FSX_ROLE)
    except iam.exceptions.ClientError as problem:
        return error_code(problem) != "NoSuchEntity"  # without permission, IAM does not say
    return True
