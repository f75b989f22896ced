"""`cluster validate` against an account: each check with cause and without.

The account is the server of this folder, which stands in for AWS and says in server.py what of it is moto's.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import boto3
import pytest

from hyperpod_ft.aws.findings import Finding, error
from hyperpod_ft.aws.session import Session
from hyperpod_ft.aws.stack.stack import StackParameters, deploy
from hyperpod_ft.aws.validation.validate import ValidationResult, account_checks, validate_account
from hyperpod_ft.config.cluster_config import ClusterConfig
from hyperpod_ft.errors import UserError
from tests.aws.conftest import REGION, ZONE_ID, Aws
from tests.aws.world import ACCOUNT

PLAN = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-plan/plan-1"
ACTIVE = {
    "Status": "Active",
    "TotalInstanceCount": 4,
    "AvailableInstanceCount": 4,
    "TargetResources": ["hyperpod-cluster"],
    "ReservedCapacitySummaries": [
        {
            "ReservedCapacityArn": f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:reserved-capacity/abc",
            "InstanceType": "ml.trn1.32xlarge",
            "TotalInstanceCount": 4,
            "Status": "Active",
            "AvailabilityZoneId": ZONE_ID,
        }
    ],
}


ROLE_ACTIONS = ("logs:*", "cloudwatch:PutMetricData", "s3:Get*", "s3:List*", "ssmmessages:*", "ec2:*")


def allow(iam: Any, role: str, *actions: str, **more: Any) -> None:
    policy = {"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": actions, "Resource": "*", **more}}
    iam.put_role_policy(RoleName=role, PolicyName="p", PolicyDocument=json.dumps(policy))


def clients(aws: Aws, **instead: Any) -> Callable[[str], Any]:
    """Clients of the server by service, `instead` of some others."""
    return lambda service: instead[service] if service in instead else aws.client(service)


def own_client(aws: Aws, service: str) -> Any:
    """A client that nobody else uses, for a test that changes its answers."""
    return boto3.Session(region_name=REGION).client(service, endpoint_url=aws.endpoint)


def trust(service: str) -> str:
    statement = {"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"Service": service}}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


@dataclass
class Place:
    """Resources that a cluster file may name under `existing`, and nothing wrong with them."""

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
        """With rules for all traffic from and to itself, and nothing else."""
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
    return {
        "workers": [{"name": "worker-group-1", "instance_type": "ml.trn1.32xlarge", "count": 2, **changes}],
    }


def check(aws: Aws, **changes: Any) -> ValidationResult:
    """Of a cluster file without `existing`."""
    return validate_account(config(**changes), clients(aws))


def of(checked: ValidationResult, field: str) -> list[Finding]:
    return [finding for finding in checked.findings if finding.field == field]


def only(findings: Any) -> Finding:
    (finding,) = findings
    assert finding.problem
    assert finding.fix
    return finding


@pytest.fixture
def place(aws: Aws) -> Place:
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


# --- all of it


def test_nothing_wrong_nothing_found_and_nothing_changed(place: Place) -> None:
    before = len(place.aws.requests())
    checked = place.check()
    assert checked.findings == ()
    assert checked.skipped == ()
    assert set(checked.done) == {check.name for check in account_checks(place.config())}
    assert checked.account == ACCOUNT
    asked = {operation for _, operation in place.aws.requests()[before:]}
    assert asked
    assert all(name.startswith(("Describe", "List", "Get", "Simulate", "HEAD", "GET")) for name in asked), asked


def test_what_the_kits_own_stack_makes_passes_as_existing(aws: Aws) -> None:
    """So its network, security group, file system, role with its policies, and bucket are what the checks ask for."""
    session = Session(region=REGION)
    stack = StackParameters(name="hyperpod-demo", zone_id=ZONE_ID)
    made = deploy(session, stack, poll_seconds=0.05)
    existing = {
        "subnet_id": made.subnet_id,
        "security_group_ids": list(made.security_group_ids),
        "execution_role_arn": made.role_arn,
        "bucket": made.bucket,
        "fsx_id": made.fsx_dns_name.partition(".")[0],
    }
    checked = validate_account(config(existing=existing), session.client)
    assert checked.findings == ()
    assert "permissions of the role" in checked.done
    aws.scenario(quotas={"VPCs per Region": 1, "Internet gateways per Region": 1, "EC2-VPC Elastic IPs": 1})
    assert validate_account(config(), session.client).findings == ()  # it has its network


def test_without_existing_resources(aws: Aws) -> None:
    checked = check(aws)
    assert checked.findings == ()
    assert "stack" in checked.done
    assert "subnet" not in checked.done


def test_checks_leave_no_thread(place: Place) -> None:
    before = threading.active_count()
    place.check()
    assert threading.active_count() == before


# --- who asks, and what could not be asked


def test_credentials_that_do_not_work_are_one_error(aws: Aws) -> None:
    aws.scenario(errors=[{"service": "sts", "operation": "GetCallerIdentity", "code": "ExpiredToken", "status": 403}])
    checked = check(aws)
    assert only(checked.findings).field == "credentials"
    assert "ExpiredToken" in checked.findings[0].problem
    assert checked.done == ()
    assert len(checked.skipped) == len(account_checks(config()))


def test_no_way_to_aws_is_one_error(aws: Aws) -> None:
    unreachable = Aws("http://127.0.0.1:9", aws.environment)
    checked = validate_account(config(), unreachable.client)
    assert "EndpointConnectionError" in only(checked.findings).problem


def test_no_credentials_are_one_error(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    session = boto3.Session(region_name=REGION)
    checked = validate_account(config(), lambda service: session.client(service, endpoint_url=aws.endpoint))
    finding = only(checked.findings)
    assert "no AWS credentials" in finding.problem
    assert "aws sts get-caller-identity" in finding.fix


def test_an_unknown_profile_is_a_users_error(aws: Aws) -> None:
    with pytest.raises(UserError, match="no such AWS profile"):
        validate_account(config(), Session(region=REGION, profile="nobody").client)


@pytest.mark.parametrize("code", ["UnauthorizedOperation", "RequestLimitExceeded"])
def test_a_check_that_could_not_be_made_is_a_warning(place: Place, code: str) -> None:
    errors = [{"service": "ec2", "operation": "DescribeRouteTables", "code": code, "status": 403, "times": 99}]
    place.aws.scenario(errors=errors)
    checked = place.check()
    finding = only(checked.findings)
    assert (finding.severity, finding.field) == ("warning", "existing.subnet_id")
    assert "could not check routes of the subnet" in finding.problem
    assert code in finding.problem
    assert ("ec2:DescribeRouteTables" in finding.fix) == (code == "UnauthorizedOperation")
    assert "routes of the subnet" not in checked.done


def test_every_denied_service_is_told_and_none_passes(place: Place) -> None:
    services = ("ec2", "iam", "sagemaker", "service-quotas", "fsx", "s3")
    denied = [{"service": s, "code": "AccessDenied", "status": 403, "times": 999} for s in services]
    place.aws.scenario(errors=denied)
    checked = place.check(**workers(training_plan_arn=PLAN))
    assert checked.done == ()
    assert len(checked.findings) == len(account_checks(place.config(**workers(training_plan_arn=PLAN))))
    assert {finding.severity for finding in checked.findings} == {"warning"}


def test_what_has_other_causes_is_told_with_aws_own_code(place: Place) -> None:
    """Neither an absent stack, object, bucket nor file system: the code says something else."""
    cluster(place, "demo", 2)
    errors = [
        {"service": "cloudformation", "operation": "DescribeStacks", "code": "Throttling"},
        {"service": "fsx", "operation": "DescribeFileSystems", "code": "InternalServerError", "status": 500},
        {"service": "iam", "operation": "SimulatePrincipalPolicy", "code": "ServiceFailure", "status": 500},
        {"service": "s3", "operation": "HEAD", "code": "AccessDenied", "status": 403},
    ]
    place.aws.scenario(errors=[{**problem, "times": 99} for problem in errors])
    told = [finding.problem for finding in place.check().findings if finding.problem.startswith("could not check")]
    assert len(told) == 5  # FSx, both permissions, the bucket, the scripts in S3
    assert any("InternalServerError" in problem for problem in told)
    told = [finding.problem for finding in check(place.aws).findings]
    assert any("Throttling" in problem for problem in told)


def test_what_makes_no_sense_after_an_offline_error_is_skipped_and_said(place: Place) -> None:
    found = [error("workers.0.instance_type", "is none", "correct it"), error("existing.bucket", "is none", "x")]
    checked = validate_account(place.config(), clients(place.aws), found)
    assert "quotas: workers.0.instance_type is wrong" in checked.skipped
    assert "bucket: existing.bucket is wrong" in checked.skipped
    assert "security groups" in checked.done
    assert not {"quotas", "bucket", "subnet"} & set(checked.done)
    before = len(place.aws.requests())
    checked = validate_account(place.config(), clients(place.aws), [error("region", "is none", "x")])
    assert len(checked.skipped) == len(account_checks(place.config()))
    assert len(place.aws.requests()) == before


# --- the subnet: AWS's validate-config.py passes a public one whose MapPublicIpOnLaunch is off


def test_a_public_subnet(place: Place) -> None:
    place.ec2.replace_route(RouteTableId=place.table, DestinationCidrBlock="0.0.0.0/0", GatewayId=place.internet)
    finding = only(place.check().findings)
    assert (finding.severity, finding.field) == ("error", "existing.subnet_id")
    assert "is public" in finding.problem
    assert place.internet in finding.problem


def test_a_subnet_that_is_public_by_the_main_route_table(place: Place) -> None:
    main = place.ec2.describe_route_tables(
        Filters=[{"Name": "vpc-id", "Values": [place.vpc]}, {"Name": "association.main", "Values": ["true"]}]
    )["RouteTables"][0]["RouteTableId"]
    place.ec2.create_route(RouteTableId=main, DestinationCidrBlock="0.0.0.0/0", GatewayId=place.internet)
    other = place.ec2.create_subnet(VpcId=place.vpc, CidrBlock="10.0.16.0/20", AvailabilityZoneId=ZONE_ID)
    checked = place.check({"subnet_id": other["Subnet"]["SubnetId"]})
    assert "is public" in only(checked.findings).problem


def test_a_subnet_without_a_way_out_and_one_that_reaches_s3_alone(place: Place) -> None:
    place.ec2.delete_route(RouteTableId=place.table, DestinationCidrBlock="0.0.0.0/0")
    finding = only(place.check().findings)
    assert finding.severity == "error"
    assert "no way out" in finding.problem
    place.ec2.create_vpc_endpoint(
        VpcId=place.vpc, ServiceName=f"com.amazonaws.{REGION}.s3", RouteTableIds=[place.table]
    )
    finding = only(place.check().findings)
    assert finding.severity == "warning"
    assert "reaches S3 alone" in finding.problem


def test_a_subnet_that_is_not_there(place: Place) -> None:
    finding = only(of(place.check({"subnet_id": "subnet-0123456789abcdef0"}), "existing.subnet_id"))
    assert "no subnet subnet-0123456789abcdef0" in finding.problem


@pytest.mark.parametrize(("attribute", "option"), [("DnsSupport", "dns-support"), ("DnsHostnames", "dns-hostnames")])
def test_a_vpc_that_resolves_no_names(place: Place, attribute: str, option: str) -> None:
    place.ec2.modify_vpc_attribute(VpcId=place.vpc, **{f"Enable{attribute}": {"Value": False}})
    finding = only(place.check().findings)
    assert f"enable{attribute} off" in finding.problem
    assert finding.fix.endswith(f"--enable-{option}")


def test_a_subnet_of_another_zone(place: Place) -> None:
    other = place.ec2.create_subnet(VpcId=place.vpc, CidrBlock="10.0.16.0/20", AvailabilityZoneId="usw2-az1")
    place.ec2.associate_route_table(RouteTableId=place.table, SubnetId=other["Subnet"]["SubnetId"])
    finding = only(of(place.check({"subnet_id": other["Subnet"]["SubnetId"]}), "existing.subnet_id"))
    assert "is in zone usw2-az1, the cluster in usw2-az4" in finding.problem


def test_a_subnet_that_is_too_small(place: Place) -> None:
    small = place.ec2.create_subnet(VpcId=place.vpc, CidrBlock="10.0.16.0/28", AvailabilityZoneId=ZONE_ID)
    place.ec2.associate_route_table(RouteTableId=place.table, SubnetId=small["Subnet"]["SubnetId"])
    finding = only(place.check({"subnet_id": small["Subnet"]["SubnetId"]}).findings)
    # the controller's, and eight network cards of each worker
    assert "has 11 free IP addresses; the nodes take 17" in finding.problem


# --- security groups: AWS's script passes one without any inbound rule, since it looks at the rules there are


@pytest.mark.parametrize(("inward", "outward", "said"), [(False, True, "inbound"), (True, False, "outbound")])
def test_a_security_group_that_keeps_nodes_apart(place: Place, inward: bool, outward: bool, said: str) -> None:
    group = place.security_group("half", inward=inward, outward=outward)
    finding = only(of(place.check({"security_group_ids": [group]}), "existing.security_group_ids"))
    assert finding.severity == "error"
    assert f"{group} has no {said} rule" in finding.problem
    assert f"--group-id {group}" in finding.fix


def test_one_of_several_groups_is_enough(place: Place) -> None:
    closed = place.security_group("closed", inward=False, outward=False)
    assert place.check({"security_group_ids": [closed, place.group]}).findings == ()


def test_outbound_to_everywhere_is_enough_where_there_is_no_efa(place: Place) -> None:
    group = place.security_group("open", outward=False)
    everywhere = [{"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]
    place.ec2.authorize_security_group_egress(GroupId=group, IpPermissions=everywhere)
    fsx = place.file_system(group=group)
    named = {"security_group_ids": [group], "fsx_id": fsx}
    assert "over EFA" in only(place.check(named).findings).problem
    assert place.check(named, **workers(instance_type="ml.m5.xlarge")).findings == ()


def test_security_groups_that_are_not_there_or_elsewhere(place: Place) -> None:
    other = place.security_group("other", vpc=place.ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"])
    checked = place.check({"security_group_ids": ["sg-0123456789abcdef0", other, place.group]})
    missing, elsewhere = checked.findings
    assert "no security group sg-0123456789abcdef0" in missing.problem
    assert other in elsewhere.problem
    assert {finding.field for finding in checked.findings} == {"existing.security_group_ids"}


# --- FSx


def test_a_file_system_that_is_not_there(place: Place) -> None:
    finding = only(place.check({"fsx_id": "fs-0123456789abcdef0"}).findings)
    assert (finding.severity, finding.field) == ("error", "existing.fsx_id")


def test_a_file_system_that_is_not_available(place: Place) -> None:
    place.aws.scenario(seconds={"fsx.create": 60})
    finding = only(place.check({"fsx_id": place.file_system()}).findings)
    assert "is CREATING" in finding.problem
    assert finding.fix == "wait for it"


def test_a_file_system_of_another_zone(place: Place) -> None:
    other = place.ec2.create_subnet(VpcId=place.vpc, CidrBlock="10.0.16.0/20", AvailabilityZoneId="usw2-az1")
    finding = only(place.check({"fsx_id": place.file_system(subnet=other["Subnet"]["SubnetId"])}).findings)
    assert "is in zone usw2-az1" in finding.problem


def test_a_file_system_of_another_vpc(place: Place) -> None:
    vpc = place.ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    subnet = place.ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.0.0/20", AvailabilityZoneId=ZONE_ID)["Subnet"]
    fsx = place.file_system(subnet["SubnetId"], place.security_group("theirs", vpc))
    problems = [finding.problem for finding in place.check({"fsx_id": fsx}).findings]
    assert any(f"is in {vpc}" in problem for problem in problems)


@pytest.mark.parametrize(
    ("ports", "cidr", "said"),
    [
        ([(988, 988), (1018, 1023)], "10.0.0.0/16", ""),
        ([(988, 1023)], "10.0.0.0/20", ""),
        ([(988, 988)], "10.0.0.0/16", "at port 1018-1023"),
        ([(1018, 1023)], "10.0.0.0/16", "at port 988"),
        ([(988, 1023)], "10.0.0.0/24", "at port 988 and 1018-1023"),
        ([], "10.0.0.0/16", "at port 988 and 1018-1023"),
    ],
)
def test_the_doors_of_a_file_system(place: Place, ports: list[tuple[int, int]], cidr: str, said: str) -> None:
    group = place.security_group("fsx", inward=False, outward=False)
    for first, last in ports:
        rule = {"IpProtocol": "tcp", "FromPort": first, "ToPort": last, "IpRanges": [{"CidrIp": cidr}]}
        place.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])
    findings = place.check({"fsx_id": place.file_system(group=group)}).findings
    if said:
        assert said in only(findings).problem
    else:
        assert findings == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"FileSystemType": "OPENZFS"}, "is OPENZFS, not LUSTRE"),
        ({"LustreConfiguration": {}}, "no mount name"),
        ({"NetworkInterfaceIds": []}, "could not check who reaches"),
        ({"Lifecycle": "FAILED"}, "is FAILED"),
    ],
)
def test_what_fsx_may_say_that_the_stand_in_never_does(place: Place, changes: dict[str, Any], said: str) -> None:
    """FSx's answer is changed on its way: the stand-in has file systems as they should be alone."""
    fsx = own_client(place.aws, "fsx")

    def change(parsed: dict[str, Any], **_: Any) -> None:
        parsed["FileSystems"][0].update(changes)

    fsx.meta.events.register("after-call.fsx.DescribeFileSystems", change)
    checked = validate_account(place.config(), clients(place.aws, fsx=fsx))
    assert said in only(checked.findings).problem


def test_a_list_of_networks_is_taken_for_one_that_lets_the_nodes_in(place: Place) -> None:
    listed = place.ec2.create_managed_prefix_list(
        PrefixListName="nodes", MaxEntries=1, AddressFamily="IPv4", Entries=[{"Cidr": "10.0.0.0/16"}]
    )["PrefixList"]["PrefixListId"]
    group = place.security_group("listed", inward=False)
    rule = {"IpProtocol": "-1", "PrefixListIds": [{"PrefixListId": listed}]}
    place.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])
    assert place.check({"fsx_id": place.file_system(group=group)}).findings == ()


# --- role, permissions, bucket


def test_a_bucket_that_s3_sends_elsewhere(place: Place) -> None:
    """S3 answers 301 with the region in a header where the request went to another region; moto does not."""
    s3 = own_client(place.aws, "s3")

    def change(http_response: Any, parsed: dict[str, Any], **_: Any) -> None:
        http_response.status_code = 301
        parsed["Error"] = {"Code": "301", "Message": "Moved Permanently"}
        parsed["ResponseMetadata"]["HTTPHeaders"]["x-amz-bucket-region"] = "eu-west-1"

    s3.meta.events.register("after-call.s3.HeadBucket", change)
    checked = validate_account(place.config(), clients(place.aws, s3=s3))
    assert "is in eu-west-1" in only(checked.findings).problem


def test_a_role_that_is_not_there_or_of_another_account(place: Place) -> None:
    role = f"arn:aws:iam::{ACCOUNT}:role/nobody"
    assert "no role nobody" in only(place.check({"execution_role_arn": role}).findings).problem
    role = "arn:aws:iam::999999999999:role/hyperpod"
    assert "is of account 999999999999" in place.check({"execution_role_arn": role}).findings[0].problem
    path = place.role.replace("role/", "role/elsewhere/")
    assert "not arn" in of(place.check({"execution_role_arn": path}), "existing.execution_role_arn")[0].problem


@pytest.mark.parametrize(("service", "trusted"), [("ec2.amazonaws.com", False), ("sagemaker.amazonaws.com", True)])
def test_a_role_that_sagemaker_may_not_take_on(place: Place, service: str, trusted: bool) -> None:
    iam = clients(place.aws)("iam")
    role = iam.create_role(RoleName="other", AssumeRolePolicyDocument=trust(service))["Role"]["Arn"]
    allow(iam, "other", *ROLE_ACTIONS)
    findings = place.check({"execution_role_arn": role}).findings
    if trusted:
        assert findings == ()
    else:
        assert "does not trust sagemaker.amazonaws.com" in only(findings).problem


def test_permissions_that_the_role_lacks(place: Place) -> None:
    place.aws.scenario(denied_actions={"hyperpod": ["ec2:CreateNetworkInterface", "s3:*"]})
    finding = only(place.check().findings)
    assert (finding.severity, finding.field) == ("error", "existing.execution_role_arn")
    assert "may not s3:ListBucket, s3:GetObject, ec2:CreateNetworkInterface" in finding.problem


def test_what_depends_on_more_than_the_simulation_knows_is_a_warning(place: Place) -> None:
    place.aws.scenario(denied_actions={"hyperpod": ["ec2:CreateTags?aws:RequestTag/team", "s3:GetObject"]})
    lacking, depends = place.check().findings
    assert (lacking.severity, depends.severity) == ("error", "warning")
    assert lacking.problem.endswith("may not s3:GetObject")
    assert "ec2:CreateTags (aws:RequestTag/team)" in depends.problem


def test_policies_are_read_where_the_simulation_is_denied(place: Place) -> None:
    denied = {"service": "iam", "operation": "SimulatePrincipalPolicy", "code": "AccessDenied", "status": 403}
    place.aws.scenario(errors=[{**denied, "times": 999}])
    finding = only(of(place.check(), "existing.execution_role_arn"))
    assert finding.severity == "warning"
    assert "could not check on what resources" in finding.problem
    managed = "arn:aws:iam::aws:policy/AmazonSageMakerClusterInstanceRolePolicy"
    clients(place.aws)("iam").attach_role_policy(RoleName="hyperpod", PolicyArn=managed)
    allow(clients(place.aws)("iam"), "hyperpod", "ec2:*")
    assert only(of(place.check(), "existing.execution_role_arn")).severity == "warning"
    clients(place.aws)("iam").detach_role_policy(RoleName="hyperpod", PolicyArn=managed)
    allow(clients(place.aws)("iam"), "hyperpod", "logs:*", "ec2:*")
    finding = only(of(place.check(), "existing.execution_role_arn"))
    assert finding.severity == "error"
    assert "cloudwatch:PutMetricData, s3:ListBucket, s3:GetObject, ssmmessages:CreateControlChannel" in finding.problem


def test_policies_that_name_other_resources(place: Place) -> None:
    elsewhere = ["arn:aws:s3:::sagemaker-theirs", "arn:aws:s3:::sagemaker-theirs/*"]
    iam = clients(place.aws)("iam")
    allow(iam, "hyperpod", *(action for action in ROLE_ACTIONS if not action.startswith("s3:")))
    statement = {"Effect": "Allow", "Action": "s3:*", "Resource": elsewhere}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    iam.put_role_policy(RoleName="hyperpod", PolicyName="bucket", PolicyDocument=policy)
    assert only(place.check().findings).problem.endswith("may not s3:ListBucket, s3:GetObject")


def test_permissions_that_the_caller_lacks(place: Place) -> None:
    caller = clients(place.aws)("sts").get_caller_identity()["Arn"].rpartition("/")[2]
    place.aws.scenario(denied_actions={caller: ["iam:PassRole", "cloudformation:*"]})
    finding = only(place.check().findings)
    assert (finding.severity, finding.field) == ("error", "credentials")
    assert finding.problem.endswith("may not iam:PassRole")  # no stack is made
    finding = only(check(place.aws).findings)
    assert "cloudformation:CreateStack" in finding.problem


@pytest.mark.parametrize(
    ("arn", "found"),
    [
        (f"arn:aws:iam::{ACCOUNT}:root", []),
        (f"arn:aws:sts::{ACCOUNT}:assumed-role/hyperpod/me", ["error"]),
        (f"arn:aws:sts::{ACCOUNT}:federated-user/me", ["warning"]),
    ],
)
def test_other_kinds_of_callers(place: Place, arn: str, found: list[str]) -> None:
    """The stand-in knows one caller: who it is, is changed on the way."""
    sts = own_client(place.aws, "sts")

    def change(parsed: dict[str, Any], **_: Any) -> None:
        parsed["Arn"] = arn

    sts.meta.events.register("after-call.sts.GetCallerIdentity", change)
    place.aws.scenario(denied_actions={"hyperpod": ["iam:PassRole"], "root": ["*"], "me": ["*"]})
    checked = validate_account(place.config(), clients(place.aws, sts=sts))
    assert [finding.severity for finding in of(checked, "credentials")] == found
    assert checked.caller == arn


def test_a_bucket_that_is_not_there_or_elsewhere(place: Place) -> None:
    assert "no bucket sagemaker-nowhere" in only(place.check({"bucket": "sagemaker-nowhere"}).findings).problem
    place.aws.client("s3", "eu-west-1").create_bucket(
        Bucket="sagemaker-far", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )
    finding = only(place.check({"bucket": "sagemaker-far"}).findings)
    assert (finding.severity, finding.field) == ("error", "existing.bucket")
    assert "in eu-west-1, the cluster in us-west-2" in finding.problem


# --- capacity


def test_a_quota_that_is_too_small_names_itself_and_what_to_ask_for(aws: Aws) -> None:
    aws.scenario(quotas={"ml.trn1.32xlarge for cluster usage": 1})
    finding = only(check(aws).findings)
    assert (finding.severity, finding.field) == ("error", "workers.0.count")
    assert "quota `ml.trn1.32xlarge for cluster usage` is 1; 2 are needed" in finding.problem
    assert "request-service-quota-increase --region us-west-2" in finding.fix
    assert "--quota-code L-" in finding.fix
    assert finding.fix.endswith("--desired-value 2")


def test_what_other_clusters_have_counts_and_what_this_one_has_does_not(place: Place) -> None:
    name = "ml.trn1.32xlarge for cluster usage"
    place.aws.scenario(quotas={name: 2})
    cluster(place, "other", 1)
    finding = only(of(place.check(), "workers.0.count"))
    assert "3 are needed, 1 of them taken by other clusters" in finding.problem
    place.aws.scenario(quotas={name: 3})
    cluster(place, "demo", 2)
    assert [f for f in place.check().findings if f.severity == "error"] == []


def test_the_quotas_of_whole_clusters_and_of_volumes(aws: Aws) -> None:
    aws.scenario(quotas={"Maximum number of instances allowed per SageMaker HyperPod cluster": 2})
    finding = only(check(aws).findings)
    assert (finding.field, finding.severity) == ("workers", "error")
    aws.scenario(
        quotas={
            "Maximum number of instances allowed per SageMaker HyperPod cluster": 20,
            "Total number of instances allowed across SageMaker HyperPod clusters": 2,
        }
    )
    assert "across SageMaker HyperPod clusters" in only(check(aws).findings).problem


def test_the_quota_of_volumes(aws: Aws) -> None:
    aws.scenario(quotas={"Maximum size of EBS volume in GB for a SageMaker HyperPod cluster instance": 500})
    assert check(aws).findings == ()
    finding = only(check(aws, **workers(volume_gb=501)).findings)
    assert (finding.field, finding.severity) == ("workers.0.volume_gb", "error")


@pytest.mark.parametrize(
    ("name", "limit", "field"),
    [
        ("VPCs per Region", 1, "name"),  # the region's default VPC is one
        ("Internet gateways per Region", 0, "name"),
        ("EC2-VPC Elastic IPs", 0, "name"),
        ("Network interfaces per Region", 16, "workers"),
    ],
)
def test_quotas_of_the_network(aws: Aws, name: str, limit: float, field: str) -> None:
    aws.scenario(quotas={name: limit})
    finding = only(check(aws).findings)
    assert (finding.field, finding.severity) == (field, "error")
    assert f"quota `{name}` is {limit}; {limit + 1} are needed" in finding.problem
    aws.scenario(quotas={name: limit + 1})
    assert check(aws).findings == ()


def test_existing_networks_need_no_quota_but_that_of_interfaces(place: Place) -> None:
    place.aws.scenario(quotas={"VPCs per Region": 0, "Internet gateways per Region": 0, "EC2-VPC Elastic IPs": 0})
    assert place.check().findings == ()
    place.aws.scenario(quotas={"Network interfaces per Region": 17})
    finding = only(place.check().findings)
    assert "in use" in finding.problem


def test_quotas_that_aws_does_not_tell_are_warnings(aws: Aws) -> None:
    """The stand-in tells all: some are left out of its answer."""
    client = own_client(aws, "service-quotas")

    def change(parsed: dict[str, Any], **_: Any) -> None:
        hidden = ("ml.trn1.32xlarge for cluster usage", "VPCs per Region")
        parsed["Quotas"] = [quota for quota in parsed["Quotas"] if quota["QuotaName"] not in hidden]

    client.meta.events.register("after-call.service-quotas", change)
    checked = validate_account(config(), clients(aws, **{"service-quotas": client}))
    assert [(f.severity, f.field) for f in checked.findings] == [
        ("warning", "workers.0.instance_type"),
        ("warning", "name"),
    ]


def test_a_zone_that_the_account_does_not_have(aws: Aws) -> None:
    finding = only(check(aws, availability_zone_id="usw2-az9").findings)
    assert finding.field == "availability_zone_id"
    assert "usw2-az4" in finding.fix


def test_a_zone_that_does_not_offer_the_instance_type(aws: Aws) -> None:
    changed = config(availability_zone_id="usw2-az1", **workers(instance_type="ml.trn2.48xlarge"))
    finding = only(validate_account(changed, clients(aws)).findings)
    assert (finding.field, finding.severity) == ("workers.0.instance_type", "error")
    assert "EC2 offers it in usw2-az4" in finding.fix
    changed = config(**workers(instance_type="ml.trn2.48xlarge"))
    assert validate_account(changed, clients(aws)).findings == ()


def test_threads_that_an_instance_type_does_not_have(aws: Aws) -> None:
    aws.scenario(quotas={"ml.c6g.large for cluster usage": 9})
    changed = config(controller={"instance_type": "ml.c6g.large", "threads_per_core": 2})
    finding = only(of(validate_account(changed, clients(aws)), "controller.threads_per_core"))
    assert "takes 1, not 2" in finding.problem
    assert of(check(aws, controller={"threads_per_core": 2}), finding.field) == []


@pytest.mark.parametrize(
    ("changes", "field", "severity", "said"),
    [
        ({"Status": "Scheduled"}, "workers.0.training_plan_arn", "warning", "starts on 2027-01-01 11:30 UTC"),
        ({"Status": "Expired"}, "workers.0.training_plan_arn", "error", "is Expired"),
        ({"TargetResources": ["training-job"]}, "workers.0.training_plan_arn", "error", "is for training-job"),
        ({"AvailableInstanceCount": 1}, "workers.0.count", "error", "has 1 instances left; 2 are asked for"),
        ({"InstanceType": "ml.p5.48xlarge"}, "workers.0.instance_type", "error", "reserves ml.p5.48xlarge"),
        ({"AvailabilityZoneId": "usw2-az1"}, "availability_zone_id", "error", "capacity in usw2-az1"),
    ],
)
def test_training_plans(aws: Aws, changes: dict[str, Any], field: str, severity: str, said: str) -> None:
    reserved = {**ACTIVE["ReservedCapacitySummaries"][0]}  # type: ignore[dict-item]
    plan: dict[str, Any] = {**ACTIVE, "ReservedCapacitySummaries": [reserved]}
    planned = config(**workers(training_plan_arn=PLAN))
    aws.scenario(training_plans={"plan-1": plan})
    assert validate_account(planned, clients(aws)).findings == ()
    for key, value in changes.items():
        (reserved if key in reserved and key != "Status" else plan)[key] = value
    aws.scenario(training_plans={"plan-1": plan})
    finding = only(validate_account(planned, clients(aws)).findings)
    assert (finding.field, finding.severity) == (field, severity)
    assert said in finding.problem


def test_a_training_plan_that_is_not_there(aws: Aws) -> None:
    finding = only(check(aws, **workers(training_plan_arn=PLAN)).findings)
    assert "no training plan plan-1" in finding.problem


def test_too_little_quota_is_a_warning_where_capacity_is_reserved(aws: Aws) -> None:
    aws.scenario(training_plans={"plan-1": ACTIVE}, quotas={"ml.trn1.32xlarge for cluster usage": 0})
    finding = only(check(aws, **workers(training_plan_arn=PLAN)).findings)
    assert finding.severity == "warning"


# --- what is there already


def cluster(place: Place, name: str, count: int, script: bool = True) -> None:
    """A cluster by the API alone, whose lifecycle script is there."""
    clients(place.aws)("s3").put_object(Bucket=place.bucket, Key="lifecycle/provision.sh", Body=b"#!/bin/bash\n")
    group = {
        "LifeCycleConfig": {"SourceS3Uri": f"s3://{place.bucket}/lifecycle", "OnInitComplete": "provision.sh"},
        "ExecutionRole": place.role,
    }
    clients(place.aws)("sagemaker").create_cluster(
        ClusterName=name,
        InstanceGroups=[
            {
                **group,
                "InstanceGroupName": "controller-machine",
                "InstanceType": "ml.c5.xlarge",
                "InstanceCount": 1,
                "SlurmConfig": {"NodeType": "Controller"},
            },
            {
                **group,
                "InstanceGroupName": "worker-group-1",
                "InstanceType": "ml.trn1.32xlarge",
                "InstanceCount": count,
                "SlurmConfig": {"NodeType": "Compute"},
            },
        ],
        VpcConfig={"Subnets": [place.subnet], "SecurityGroupIds": [place.group]},
        Orchestrator={"Slurm": {"SlurmConfigStrategy": "Managed"}},
    )


def test_a_cluster_of_that_name(place: Place) -> None:
    cluster(place, "demo", 2)
    finding = only(place.check().findings)
    assert (finding.severity, finding.field) == ("warning", "name")
    assert "would go on with it" in finding.problem


def test_a_cluster_of_that_name_that_failed(place: Place) -> None:
    cluster(place, "demo", 2)
    sagemaker = own_client(place.aws, "sagemaker")

    def change(parsed: dict[str, Any], **_: Any) -> None:
        parsed["ClusterStatus"] = "Failed"

    sagemaker.meta.events.register("after-call.sagemaker.DescribeCluster", change)
    checked = validate_account(place.config(), clients(place.aws, sagemaker=sagemaker))
    assert only(checked.findings).severity == "error"


def test_a_cluster_that_has_lost_its_lifecycle_scripts(place: Place) -> None:
    cluster(place, "demo", 2)
    clients(place.aws)("s3").delete_object(Bucket=place.bucket, Key="lifecycle/provision.sh")
    errors = [finding for finding in place.check().findings if finding.severity == "error"]
    assert len(errors) == 2
    assert "s3://sagemaker-mine/lifecycle/provision.sh" in errors[0].problem


STACK = StackParameters(name="hyperpod-demo", zone_id=ZONE_ID)


def test_a_stack_of_that_name_is_gone_on_with(aws: Aws) -> None:
    deploy(Session(region=REGION), STACK, poll_seconds=0.05)
    assert check(aws).findings == ()


def test_a_stack_that_failed_is_told_as_create_would_tell_it(aws: Aws) -> None:
    """In the same words: what to do about a broken stack must not lose the data that it holds."""
    aws.scenario(fail_resources={"AWS::EC2::NatGateway": "no more"})
    with pytest.raises(UserError) as refused:
        deploy(Session(region=REGION), STACK, poll_seconds=0.05)
    finding = only(check(aws).findings)
    assert (finding.severity, finding.field) == ("error", "name")
    assert str(refused.value) == f"{finding.problem}; {finding.fix}"
    assert "is ROLLBACK_COMPLETE: Nat" in finding.problem


def test_a_stack_of_that_name_that_is_not_the_kits(aws: Aws) -> None:
    template = {"Resources": {"Bucket": {"Type": "AWS::S3::Bucket", "Properties": {}}}}
    client = clients(aws)("cloudformation")
    client.create_stack(StackName="hyperpod-demo", TemplateBody=json.dumps(template))
    while "PROGRESS" in client.describe_stacks(StackName="hyperpod-demo")["Stacks"][0]["StackStatus"]:
        time.sleep(0.02)
    assert "is not of this kit" in only(check(aws).findings).problem
