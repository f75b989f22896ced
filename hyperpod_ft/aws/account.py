"""What every check of an account works with: the cluster file, who asks, and a client of each service."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hyperpod_ft.aws.addresses import ec2_type
from hyperpod_ft.aws.cluster_file import ClusterConfig, Existing
from hyperpod_ft.aws.session import DENIED, error_code, redacted

SERVICES = ("sts", "ec2", "iam", "sagemaker", "service-quotas", "cloudformation", "fsx", "s3")
# Operations whose permission has another name ("Actions, resources, and condition keys for Amazon S3")
_PERMISSIONS = {"HeadBucket": "s3:ListBucket", "HeadObject": "s3:GetObject", "ListObjectsV2": "s3:ListBucket"}


@dataclass(frozen=True)
class Account:
    """`clients` are boto3's, by service, and safe to be used by several threads."""

    config: ClusterConfig
    clients: Mapping[str, Any]
    number: str  # twelve digits
    caller: str  # the caller's ARN

    @property
    def partition(self) -> str:
        return self.caller.split(":")[1]

    @property
    def existing(self) -> Existing:
        """Only for checks of existing resources, which run when there are some."""
        assert self.config.existing is not None
        return self.config.existing

    def cluster(self) -> dict[str, Any] | None:
        """What DescribeCluster says of a cluster of this name; None where there is none."""
        try:
            described: dict[str, Any] = self.clients["sagemaker"].describe_cluster(ClusterName=self.config.name)
        except self.clients["sagemaker"].exceptions.ClientError as error:
            if error_code(error) == "ResourceNotFound":
                return None
            raise
        return described

    def instance_types(self) -> dict[str, dict[str, Any]]:
        """What EC2 says of the cluster's instance types, by SageMaker's name; those that it knows in this region."""
        names = sorted({group.instance_type for group in self.config.groups})
        pages = (
            self.clients["ec2"]
            .get_paginator("describe_instance_types")
            .paginate(Filters=[{"Name": "instance-type", "Values": [ec2_type(name) for name in names]}])
        )
        return {f"ml.{found['InstanceType']}": found for page in pages for found in page["InstanceTypes"]}

    def subnet(self) -> dict[str, Any] | None:
        """The existing subnet; None where there is none."""
        found = self.clients["ec2"].describe_subnets(
            Filters=[{"Name": "subnet-id", "Values": [self.existing.subnet_id]}]
        )["Subnets"]
        return found[0] if found else None

    def security_groups(self, ids: list[str]) -> list[dict[str, Any]]:
        """Those of `ids` that there are."""
        pages = (
            self.clients["ec2"]
            .get_paginator("describe_security_groups")
            .paginate(Filters=[{"Name": "group-id", "Values": ids}])
        )
        return [group for page in pages for group in page["SecurityGroups"]]


def why_not_checked(error: Exception, clients: Mapping[str, Any]) -> tuple[str, str]:
    """What kept a check from its answer, and what to do about it, for any error of botocore."""
    operation = getattr(error, "operation_name", "")
    if not operation:
        return f"{type(error).__name__}: {redacted(str(error))}", "check network and credentials, then validate again"
    code = error_code(error)
    if code in DENIED:
        return f"AWS answers {code} to {operation}", f"allow {_permission(operation, clients)} to yourself"
    return f"AWS answers {code} to {operation}", "validate again later"


def _permission(operation: str, clients: Mapping[str, Any]) -> str:
    if operation in _PERMISSIONS:
        return _PERMISSIONS[operation]
    models = [client.meta.service_model for client in clients.values()]
    return next((f"{m.signing_name}:{operation}" for m in models if operation in m.operation_names), operation)
