"""The subnet, its outbound route and the security groups under `existing`; each check on wrong and on valid ones."""

import pytest

from tests.aws.account_place import Place, of, only, workers
from tests.aws.conftest import REGION, ZONE_ID


def test_a_public_subnet(place: Place) -> None:
    place.ec2.replace_route(RouteTableId=place.table, DestinationCidrBlock="0.0.0.0/0", GatewayId=place.internet)
    finding = only(place.check().findings)
    assert (finding.verdict, finding.name) == ("error", "existing.subnet_id")
    assert "is public" in finding.found
    assert place.internet in finding.found


def test_a_subnet_that_is_public_by_the_main_route_table(place: Place) -> None:
    main = place.ec2.describe_route_tables(
        Filters=[{"Name": "vpc-id", "Values": [place.vpc]}, {"Name": "association.main", "Values": ["true"]}]
    )["RouteTables"][0]["RouteTableId"]
    place.ec2.create_route(RouteTableId=main, DestinationCidrBlock="0.0.0.0/0", GatewayId=place.internet)
    other = place.ec2.create_subnet(VpcId=place.vpc, CidrBlock="10.0.16.0/20", AvailabilityZoneId=ZONE_ID)
    checked = place.check({"subnet_id": other["Subnet"]["SubnetId"]})
    assert "is public" in only(checked.findings).found


def test_a_subnet_without_a_way_out_and_one_that_reaches_s3_alone(place: Place) -> None:
    place.ec2.delete_route(RouteTableId=place.table, DestinationCidrBlock="0.0.0.0/0")
    finding = only(place.check().findings)
    assert finding.verdict == "error"
    assert "no outbound route" in finding.found
    place.ec2.create_vpc_endpoint(
        VpcId=place.vpc, ServiceName=f"com.amazonaws.{REGION}.s3", RouteTableIds=[place.table]
    )
    finding = only(place.check().findings)
    assert finding.verdict == "warning"
    assert "reaches only S3" in finding.found


def test_a_subnet_that_is_not_there(place: Place) -> None:
    finding = only(of(place.check({"subnet_id": "subnet-0123456789abcdef0"}), "existing.subnet_id"))
    assert "no subnet subnet-0123456789abcdef0" in finding.found


@pytest.mark.parametrize(("attribute", "option"), [("DnsSupport", "dns-support"), ("DnsHostnames", "dns-hostnames")])
def test_a_vpc_that_resolves_no_names(place: Place, attribute: str, option: str) -> None:
    place.ec2.modify_vpc_attribute(VpcId=place.vpc, **{f"Enable{attribute}": {"Value": False}})
    finding = only(place.check().findings)
    assert f"enable{attribute} off" in finding.found
    assert finding.remedy.endswith(f"--enable-{option}")


def test_a_subnet_of_another_zone(place: Place) -> None:
    other = place.ec2.create_subnet(VpcId=place.vpc, CidrBlock="10.0.16.0/20", AvailabilityZoneId="usw2-az1")
    place.ec2.associate_route_table(RouteTableId=place.table, SubnetId=other["Subnet"]["SubnetId"])
    finding = only(of(place.check({"subnet_id": other["Subnet"]["SubnetId"]}), "existing.subnet_id"))
    assert "is in zone usw2-az1, the cluster in usw2-az4" in finding.found


def test_a_subnet_that_is_too_small(place: Place) -> None:
    small = place.ec2.create_subnet(VpcId=place.vpc, CidrBlock="10.0.16.0/28", AvailabilityZoneId=ZONE_ID)
    place.ec2.associate_route_table(RouteTableId=place.table, SubnetId=small["Subnet"]["SubnetId"])
    finding = only(place.check({"subnet_id": small["Subnet"]["SubnetId"]}).findings)
    # the controller's, and eight network cards of each worker
    assert "has 11 free IP addresses; the nodes need 17" in finding.found


@pytest.mark.parametrize(("inward", "outward", "said"), [(False, True, "inbound"), (True, False, "outbound")])
def test_a_security_group_that_keeps_nodes_apart(place: Place, inward: bool, outward: bool, said: str) -> None:
    group = place.security_group("half", inward=inward, outward=outward)
    finding = only(of(place.check({"security_group_ids": [group]}), "existing.security_group_ids"))
    assert finding.verdict == "error"
    assert f"{group} has no {said} rule" in finding.found
    assert f"--group-id {group}" in finding.remedy


# of the second, the kit's catalogue knows nothing
@pytest.mark.parametrize("instance_type", ["ml.trn1.32xlarge", "ml.c5n.18xlarge"])
def test_with_efa_every_group_must_let_the_nodes_through(place: Place, instance_type: str) -> None:
    closed = place.security_group("closed", inward=False, outward=False)
    named = {"security_group_ids": [place.group, closed]}
    findings = of(place.check(named, **workers(instance_type=instance_type)), "existing.security_group_ids")
    assert [finding.verdict for finding in findings] == ["error", "error"]
    assert all(f"--group-id {closed}" in finding.remedy for finding in findings), "in and out"
    assert place.check(named, **workers(instance_type="ml.m5.xlarge")).findings == (), "without EFA, one is enough"


def test_outbound_to_everywhere_is_enough_where_there_is_no_efa(place: Place) -> None:
    group = place.security_group("open", outward=False)
    everywhere = [{"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]
    place.ec2.authorize_security_group_egress(GroupId=group, IpPermissions=everywhere)
    fsx = place.file_system(group=group)
    named = {"security_group_ids": [group], "fsx_id": fsx}
    assert "over EFA" in only(place.check(named).findings).found
    assert place.check(named, **workers(instance_type="ml.m5.xlarge")).findings == ()


def test_security_groups_that_are_not_there_or_elsewhere(place: Place) -> None:
    other = place.security_group("other", vpc=place.ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"])
    checked = place.check({"security_group_ids": ["sg-0123456789abcdef0", other, place.group]})
    missing, elsewhere = checked.findings
    assert "no security group sg-0123456789abcdef0" in missing.found
    assert other in elsewhere.found
    assert {finding.name for finding in checked.findings} == {"existing.security_group_ids"}
