"""The input of every check of an account: the cluster file, the caller, and a client for each service."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hyperpod_ft.aws.hyperpod import api
from hyperpod_ft.aws.session import explain
from hyperpod_ft.aws.stack import events
from hyperpod_ft.aws.validation.addresses import ec2_type
from hyperpod_ft.config.cluster_config import ClusterConfig, Existing

SERVICES = ("sts", "ec2", "iam", "sagemaker", "service-quotas", "cloudformation", "fsx", "s3", "kms")


@dataclass(frozen=True)
class CheckInput:
    """What a check of an account looks at. `clients` are boto3's, by service; several threads may use them."""

    config: ClusterConfig
    clients: Mapping[str, Any]
    account_id: str  # twelve digits
    caller: str  # the caller's ARN

    @property
    def partition(self) -> str:
        return self.caller.split(":")[1]

    @property
    def existing(self) -> Existing:
        """The existing resources; only checks of such resources may ask for them."""
        assert self.config.existing is not None
        return self.config.existing

    def cluster(self) -> dict[str, Any] | None:
        """DescribeCluster's answer for the cluster's name; None if it does not exist."""
        return api.describe(self.clients["sagemaker"], self.config.name)

    def stack(self) -> dict[str, Any] | None:
        """The cluster's stack, from DescribeStacks; None if it does not exist."""
        return events.describe(self.clients["cloudformation"], self.config.stack_name)

    def instance_types(self) -> dict[str, dict[str, Any]]:
        """EC2's descriptions of the cluster's instance types, by SageMaker's name, if offered in this region."""
        names = sorted({group.instance_type for group in self.config.groups})
        pages = (
            self.clients["ec2"]
            .get_paginator("describe_instance_types")
            .paginate(Filters=[{"Name": "instance-type", "Values": [ec2_type(name) for name in names]}])
        )
        return {f"ml.{found['InstanceType']}": found for page in pages for found in page["InstanceTypes"]}

    def subnet(self) -> dict[str, Any] | None:
        """The existing subnet; None if it does not exist."""
        found = self.clients["ec2"].describe_subnets(
            Filters=[{"Name": "subnet-id", "Values": [self.existing.subnet_id]}]
        )["Subnets"]
        return found[0] if found else None

    def security_groups(self, ids: list[str]) -> list[dict[str, Any]]:
        """The security groups among `ids` that exist."""
        pages = (
            self.clients["ec2"]
            .get_paginator("describe_security_groups")
            .paginate(Filters=[{"Name": "group-id", "Values": ids}])
        )
        return [group for page in pages for group in page["SecurityGroups"]]


def why_not_checked(error: Exception, clients: Mapping[str, Any]) -> tuple[str, str]:
    """Why a check could not run, and what to do about it, for any error of botocore."""
    problem, remedy = explain(error, {})
    operation = getattr(error, "operation_name", "")
    models = [client.meta.service_model for client in clients.values()]
    service = next((model.signing_name for model in models if operation in model.operation_names), "")
    if remedy.endswith(f" {operation}") and service:  # AWS's message does not name the service
        remedy = remedy.replace(operation, f"{service}:{operation}")
    return problem, remedy or "run validate again later"
