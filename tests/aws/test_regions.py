"""Regions and the ids of their zones."""

import pytest

pytest.importorskip("botocore")
from hyperpod_ft.aws.checks import service_model


def test_the_zones_of_every_region_are_named_as_the_rule_says():
    """moto's table of zones was taken from AWS."""
    from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend

    compared = 0
    for region in service_model.known_regions("sagemaker"):
        zones = RegionsAndZonesBackend.zones.get(region, [])
        assert {zone.zone_id.rpartition("-az")[0] for zone in zones} <= {service_model.zone_prefix(region)}
        compared += bool(zones)
    assert compared > 35
    assert service_model.known_regions("sagemaker")["us-west-2"] == "aws"
