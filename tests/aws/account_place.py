"""Resources of an account that a cluster file may name under `existing`, and the checks run on them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import boto3

from hyperpod_ft.aws.checks.account import ValidationResult
from hyperpod_ft.cluster.config import ClusterConfig
from hyperpod_ft.cluster.validation.validate import validate_account
from hyperpod_ft.findings import Finding
from tests.aws.conftest import REGION, ZONE_ID, Aws
from tests.aws.world import ACCOUNT


def allow(iam: Any, role: str, *actions: str, **more: Any) -> None:
    policy = {"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": actions, "Resource": "*", **more}}
    iam.put_role_policy(RoleName=role, PolicyName="p", PolicyDocument=json.dumps(policy))


def allowed(aws: Aws, role: str, action: str, resource: str = "*", **context: str) -> bool:
    """Whether a role may do something, as IAM's policy simulator says."""
    entries = [
        {"ContextKeyName": key.replace("_", ":"), "ContextKeyValues": [value], "ContextKeyType": "string"}
        for key, value in context.items()
    ]
    answer = aws.client("iam").simulate_principal_policy(
        PolicySourceArn=role, ActionNames=[action], ResourceArns=[resource], ContextEntries=entries
    )
    return str(answer["EvaluationResults"][0]["EvalDecision"]) == "allowed"


def clients(aws: Aws, **instead: Any) -> Callable[[str], Any]:
    """Clients of the server, by service; those in `instead` replace the usual ones."""
    return lambda service: instead[service] if service in instead else aws.client(service)


def own_client(aws: Aws, service: str) -> Any:
    """A client that no other test shares, so that a test can change its answers."""
    return boto3.Session(region_name=REGION).client(service, endpoint_url=aws.endpoint)


def trust(service: str) -> str:
    statement = {"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"Service": service}}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


def put_image(aws: Aws, uri: str) -> None:
    """An image in ECR, without content. moto looks for those of any registry in one's own account."""
    registry, _, name = uri.partition(".dkr.ecr.")
    repository, _, tag = name.partition("/")[2].rpartition(":")
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json", "layers": []}
    ecr = aws.client("ecr")
    ecr.create_repository(registryId=registry, repositoryName=repository)
    ecr.put_image(repositoryName=repository, imageTag=tag, imageManifest=json.dumps(manifest))


PLAN = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-plan/plan-1"
ROLE_ACTIONS = ("logs:*", "cloudwatch:PutMetricData", "s3:Get*", "s3:List*", "ssmmessages:*", "ec2:*")


@dataclass
class Place:
    """Valid resources that a cluster file may name under `existing`."""

    aws: Aws
    vpc: str
    subnet: str
    table: str
    group: str
    role: str
    fsx: str
    internet: str
    bucket: str = "sagemaker-mine"

    @property
    def ec2(self) -> Any:
        return clients(self.aws)("ec2")

    def config(self, existing: dict[str, Any] | None = None, **changes: Any) -> ClusterConfig:
        named = {
            "subnet_id": self.subnet,
            "security_group_ids": [self.group],
            "execution_role_arn": self.role,
            "bucket": self.bucket,
            "fsx_id": self.fsx,
        }
        return config(existing={**named, **(existing or {})}, **changes)

    def check(self, existing: dict[str, Any] | None = None, **changes: Any) -> ValidationResult:
        return validate_account(self.config(existing, **changes), clients(self.aws))

    def file_system(self, subnet: str = "", group: str = "") -> str:
        fsx = clients(self.aws)("fsx")
        made: str = fsx.create_file_system(
            FileSystemType="LUSTRE",
            StorageCapacity=1200,
            SubnetIds=[subnet or self.subnet],
            SecurityGroupIds=[group or self.group],
            LustreConfiguration={"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": 250},
        )["FileSystem"]["FileSystemId"]
        return made

    def security_group(self, name: str, vpc: str = "", inward: bool = True, outward: bool = True) -> str:
        """A security group whose only rules allow all traffic from and to itself."""
        made: str = self.ec2.create_security_group(GroupName=name, Description=name, VpcId=vpc or self.vpc)["GroupId"]
        itself = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": made}]}]
        everywhere = [{"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]
        self.ec2.revoke_security_group_egress(GroupId=made, IpPermissions=everywhere)
        if inward:
            self.ec2.authorize_security_group_ingress(GroupId=made, IpPermissions=itself)
        if outward:
            self.ec2.authorize_security_group_egress(GroupId=made, IpPermissions=itself)
        return made


def config(**changes: Any) -> ClusterConfig:
    workers = [{"name": "worker-group-1", "instance_type": "ml.trn1.32xlarge", "count": 2}]
    values = {"name": "demo", "region": REGION, "availability_zone_id": ZONE_ID, "workers": workers}
    return ClusterConfig.model_validate({**values, **changes})


def workers(**changes: Any) -> dict[str, Any]:
    return {"workers": [{"name": "worker-group-1", "instance_type": "ml.trn1.32xlarge", "count": 2, **changes}]}


def check(aws: Aws, **changes: Any) -> ValidationResult:
    """Check a cluster file without `existing`."""
    return validate_account(config(**changes), clients(aws))


def of(checked: ValidationResult, field: str) -> list[Finding]:
    return [finding for finding in checked.findings if finding.name == field]


def only(findings: Any) -> Finding:
    (finding,) = findings
    assert finding.found
    assert finding.remedy
    return finding


def make_place(aws: Aws) -> Place:
    """A VPC with a private subnet behind a NAT gateway, a security group, a role, a bucket and a file system."""
    ec2, s3, iam = clients(aws)("ec2"), clients(aws)("s3"), clients(aws)("iam")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    internet = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.modify_vpc_attribute(VpcId=vpc, EnableDnsHostnames={"Value": True})
    ec2.attach_internet_gateway(InternetGatewayId=internet, VpcId=vpc)
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/20", AvailabilityZoneId=ZONE_ID)["Subnet"]["SubnetId"]
    public = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.128.0/24", AvailabilityZoneId=ZONE_ID)["Subnet"]["SubnetId"]
    nat = ec2.create_nat_gateway(SubnetId=public, AllocationId=ec2.allocate_address(Domain="vpc")["AllocationId"])
    table = ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]
    ec2.create_route(
        RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", NatGatewayId=nat["NatGateway"]["NatGatewayId"]
    )
    ec2.associate_route_table(RouteTableId=table, SubnetId=subnet)
    s3.create_bucket(Bucket="sagemaker-mine", CreateBucketConfiguration={"LocationConstraint": REGION})
    role = iam.create_role(RoleName="hyperpod", AssumeRolePolicyDocument=trust("sagemaker.amazonaws.com"))
    allow(iam, "hyperpod", *ROLE_ACTIONS)
    aws.scenario(seconds={"fsx.create": 0})
    made = Place(aws, vpc, subnet, table, "", role["Role"]["Arn"], "", internet)
    made.group = made.security_group("nodes")
    made.fsx = made.file_system()
    return made


def cluster(place: Place, name: str, count: int, folder: str = "lifecycle") -> None:
    """A cluster created through the API alone, with its lifecycle script in place."""
    clients(place.aws)("sagemaker").create_cluster(
        **cluster_request(place, name, folder, ("worker-group-1", count, "ml.trn1.32xlarge"))
    )


def cluster_request(place: Place, name: str, folder: str, *workers: tuple[str, int, str]) -> dict[str, Any]:
    """CreateCluster's, with the script in place; `workers`: name, number and type of each group."""
    clients(place.aws)("s3").put_object(Bucket=place.bucket, Key=f"{folder}/provision.sh", Body=b"#!/bin/bash\n")
    kinds = [("Controller", "controller-machine", 1, "ml.c5.xlarge"), *(("Compute", *group) for group in workers)]
    return {
        "ClusterName": name,
        "InstanceGroups": [
            {
                "InstanceGroupName": group,
                "InstanceType": instance_type,
                "InstanceCount": count,
                "LifeCycleConfig": {"SourceS3Uri": f"s3://{place.bucket}/{folder}", "OnInitComplete": "provision.sh"},
                "ExecutionRole": place.role,
                "SlurmConfig": {"NodeType": kind},
            }
            for kind, group, count, instance_type in kinds
        ],
        "VpcConfig": {"Subnets": [place.subnet], "SecurityGroupIds": [place.group]},
        "Orchestrator": {"Slurm": {"SlurmConfigStrategy": "Managed"}},
    }
