"""The permissions that the role of HyperPod's nodes needs."""

from hyperpod_ft.aws.checks import role
from hyperpod_ft.aws.checks.role import Need
from hyperpod_ft.cluster.validation.check_input import CheckInput
from hyperpod_ft.findings import Finding


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
