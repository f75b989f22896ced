"""The file system under `existing`: where it is, its state, and whether nodes reach it."""

from typing import Any

import pytest

from hyperpod_ft.cluster.validation.validate import validate_account
from tests.aws.account_place import Place, clients, only, own_client
from tests.aws.conftest import ZONE_ID


def test_a_file_system_that_is_not_there(place: Place) -> None:
    finding = only(place.check({"fsx_id": "fs-0123456789abcdef0"}).findings)
    assert (finding.verdict, finding.name) == ("error", "existing.fsx_id")


def test_a_file_system_that_is_not_available(place: Place) -> None:
    place.aws.scenario(seconds={"fsx.create": 3600})
    finding = only(place.check({"fsx_id": place.file_system()}).findings)
    assert "is CREATING" in finding.found
    assert finding.remedy == "wait for it"


def test_a_file_system_of_another_zone(place: Place) -> None:
    other = place.ec2.create_subnet(VpcId=place.vpc, CidrBlock="10.0.16.0/20", AvailabilityZoneId="usw2-az1")
    finding = only(place.check({"fsx_id": place.file_system(subnet=other["Subnet"]["SubnetId"])}).findings)
    assert "is in zone usw2-az1" in finding.found


def test_a_file_system_of_another_vpc(place: Place) -> None:
    vpc = place.ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    subnet = place.ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.0.0/20", AvailabilityZoneId=ZONE_ID)["Subnet"]
    fsx = place.file_system(subnet["SubnetId"], place.security_group("theirs", vpc))
    problems = [finding.found for finding in place.check({"fsx_id": fsx}).findings]
    assert any(f"is in {vpc}" in problem for problem in problems)


@pytest.mark.parametrize(
    ("ports", "cidr", "said"),
    [
        ([(988, 988), (1018, 1023)], "10.0.0.0/16", ""),
        ([(988, 1023)], "10.0.0.0/20", ""),
        ([(988, 988)], "10.0.0.0/16", "TCP 1018-1023"),
        ([(1018, 1023)], "10.0.0.0/16", "TCP 988"),
        ([(988, 1023)], "10.0.0.0/24", "TCP 988 and 1018-1023"),
        ([], "10.0.0.0/16", "TCP 988 and 1018-1023"),
    ],
)
def test_security_groups_of_a_file_system(place: Place, ports: list[tuple[int, int]], cidr: str, said: str) -> None:
    group = place.security_group("fsx", inward=False, outward=False)
    for first, last in ports:
        rule = {"IpProtocol": "tcp", "FromPort": first, "ToPort": last, "IpRanges": [{"CidrIp": cidr}]}
        place.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])
    findings = place.check({"fsx_id": place.file_system(group=group)}).findings
    if said:
        assert said in only(findings).found
    else:
        assert findings == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"FileSystemType": "OPENZFS"}, "is OPENZFS, not LUSTRE"),
        ({"LustreConfiguration": {}}, "no mount name"),
        ({"NetworkInterfaceIds": []}, "no network interfaces"),
        ({"Lifecycle": "FAILED"}, "is FAILED"),
    ],
)
def test_answers_of_fsx_that_the_stand_in_never_gives(place: Place, changes: dict[str, Any], said: str) -> None:
    """FSx's answer is changed in transit: the stand-in only has valid file systems."""
    fsx = own_client(place.aws, "fsx")

    def change(parsed: dict[str, Any], **_: Any) -> None:
        parsed["FileSystems"][0].update(changes)

    fsx.meta.events.register("after-call.fsx.DescribeFileSystems", change)
    checked = validate_account(place.config(), clients(place.aws, fsx=fsx))
    assert said in only(checked.findings).found


def test_a_list_of_networks_is_taken_for_one_that_lets_the_nodes_in(place: Place) -> None:
    listed = place.ec2.create_managed_prefix_list(
        PrefixListName="nodes", MaxEntries=1, AddressFamily="IPv4", Entries=[{"Cidr": "10.0.0.0/16"}]
    )["PrefixList"]["PrefixListId"]
    group = place.security_group("listed", inward=False)
    rule = {"IpProtocol": "-1", "PrefixListIds": [{"PrefixListId": listed}]}
    place.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])
    assert place.check({"fsx_id": place.file_system(group=group)}).findings == ()
