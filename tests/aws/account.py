"""What every AWS account finds and moto does not have: a managed policy, and newer instance types in some zones."""

from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS
from moto.iam.models import AWSManagedPolicy, iam_backends

from tests.aws.world import ACCOUNT

_POLICIES = ("AmazonSageMakerClusterInstanceRolePolicy",)
# Where AWS offers what moto's table, of an older day, does not have.
_OFFERED = {"us-west-2": {"trn2.48xlarge": ["usw2-az4"], "trn2.3xlarge": ["usw2-az4"]}}


def add_managed_policies() -> None:
    """After each reset of moto. Their documents do not matter: nothing here asks for permissions."""
    for name in _POLICIES:
        policy = AWSManagedPolicy(name, ACCOUNT, "us-east-1", document='{"Version": "2012-10-17", "Statement": []}')
        iam_backends[ACCOUNT]["aws"].managed_policies[policy.arn] = policy


def offer_newer_types() -> None:
    """Once: moto keeps its table for ever."""
    for region, types in _OFFERED.items():
        for instance_type, zones in types.items():
            for kind, places in (("availability-zone-id", zones), ("region", [region])):
                INSTANCE_TYPE_OFFERINGS[kind][region] += [
                    {"InstanceType": instance_type, "Location": place, "LocationType": kind} for place in places
                ]
