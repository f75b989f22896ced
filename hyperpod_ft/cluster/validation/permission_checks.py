"""The permissions that the role of HyperPod's nodes needs, and whether nodes find the lifecycle scripts unchanged, and
cannot change them."""

from collections.abc import Iterator

from hyperpod_ft.aws.checks import role
from hyperpod_ft.aws.checks.role import Need, denied
from hyperpod_ft.aws.s3 import objects
from hyperpod_ft.aws.s3.objects import Location
from hyperpod_ft.cluster.hyperpod import lifecycle_files
from hyperpod_ft.cluster.validation.check_input import ROLE, CheckInput
from hyperpod_ft.findings import Finding, error, warning

SCRIPTS = "lifecycle scripts"  # the field of findings about those in S3: the cluster file has no key for them
_WRITES = ("s3:PutObject", "s3:DeleteObject")


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


def role_permissions(given: CheckInput) -> list[Finding]:
    """The role has the permissions that HyperPod's nodes need."""
    remedy = "attach AmazonSageMakerClusterInstanceRolePolicy and AWS's additions for a VPC, or allow these actions"
    return role.has_permissions(given, role_needs(given), remedy)


def scripts(given: CheckInput) -> list[Finding]:
    """The scripts of an existing cluster, which its replaced and new nodes run, are there and as they were uploaded."""
    cluster, s3 = given.cluster(), given.clients["s3"]
    findings, folders = [], set()
    for group in cluster.get("InstanceGroups", []) if cluster else []:
        lifecycle = group.get("LifeCycleConfig", {})
        script = lifecycle.get("OnCreate") or lifecycle.get("OnInitComplete")
        if script and "SourceS3Uri" in lifecycle:
            location = Location.of(lifecycle["SourceS3Uri"])
            folders.add(str(location))
            if not objects.exists(s3, location, script):
                problem = f"the lifecycle script of group {group['InstanceGroupName']} is missing: {location}/{script}"
                findings.append(error(SCRIPTS, problem, "upload it again; without it no node can be replaced"))
    if findings:
        return findings
    return [_changed(folder, names) for folder in sorted(folders) if (names := lifecycle_files.changed(s3, folder))]


def _changed(folder: str, names: list[str]) -> Finding:
    return warning(
        SCRIPTS,
        f"{folder}: not as it was uploaded: {', '.join(names)}; new nodes would run this as root, or fail",
        "find out who may write there; `hyperpod-ft cluster create` uploads all files again and removes others",
    )


def role_only_reads(given: CheckInput) -> Iterator[Finding]:
    """The nodes' role cannot write where the scripts are, as far as its own policies say."""
    arn, bucket = given.existing.execution_role_arn, given.existing.bucket
    below = f"arn:{given.partition}:s3:::{bucket}/{lifecycle_files.PREFIX}/*"
    need = Need(_WRITES, below.replace("*", "provision.sh"))
    iam = given.clients["iam"]
    try:
        refused = {action for action, _ in denied(iam, arn, [need])}
    except iam.exceptions.NoSuchEntityException:
        return  # reported by `role`
    if not (allowed := [action for action in _WRITES if action not in refused]):
        return
    yield warning(
        ROLE,
        f"{arn.rpartition('/')[2]} may {', '.join(allowed)} on the lifecycle scripts in {bucket}: every user of a"
        " node can act as this role, and so become root on the next node",
        f"deny it {', '.join(_WRITES)} on {below}, as templates/cluster/stack.yaml does",
    )
