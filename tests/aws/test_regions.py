"""Regions and the ids of their zones."""

import pytest

pytest.importorskip("botocore")
from hyperpod_ft.aws.validation import regions


def test_the_zones_of_every_region_are_named_as_the_rule_says():
    """moto's table of zones was taken from AWS."""
    from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend

    compared = 0
    for region in regions.known("sagemaker"):
        zones = RegionsAndZonesBackend.zones.get(region, [])
        assert {zone.zone_id.rpartition("-az")[0] for zone in zones} <= {regions.zone_prefix(region)}
        compared += bool(zones)
    assert compared > 35
    assert regions.known("sagemaker")["us-west-2"] == "aws"


@pytest.mark.parametrize(
    ("region", "prefix"),
    [
        ("us-west-2", "usw2"),
        ("ap-southeast-1", "apse1"),
        ("us-gov-east-1", "usge1"),
        ("eu-central-1", "euc1"),
        ("cn-northwest-1", "cnnw1"),
        ("eusc-de-east-1", None),
        ("us-isob-east-1", None),
    ],
)
def test_zone_prefixes(region, prefix):
    assert regions.zone_prefix(region) == prefix
