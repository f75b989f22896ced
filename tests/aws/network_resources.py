"""The EC2 resources of a CloudFormation stack."""

import json
from typing import Any

from tests.aws.resource_kinds import Context, Kind, Properties, deletion
from tests.aws.wire import AwsError


def _ec2_tags(context: Context, identifier: str, properties: Properties) -> None:
    # moto refuses the reserved prefix that only CloudFormation itself may write.
    tags = [tag for tag in context.all_tags(properties) if not tag["Key"].startswith("aws:")]
    if tags:
        context.client("ec2").create_tags(Resources=[identifier], Tags=tags)


def _vpc(context: Context, properties: Properties) -> tuple[str, dict[str, Any]]:
    ec2 = context.client("ec2")
    vpc = ec2.create_vpc(CidrBlock=properties["CidrBlock"])["Vpc"]
    for name in ("EnableDnsSupport", "EnableDnsHostnames"):
        if name in properties:
            ec2.modify_vpc_attribute(VpcId=vpc["VpcId"], **{name: {"Value": properties[name] in (True, "true")}})
    _ec2_tags(context, vpc["VpcId"], properties)
    return vpc["VpcId"], {"CidrBlock": vpc["CidrBlock"]}


def _subnet(context: Context, properties: Properties) -> tuple[str, dict[str, Any]]:
    ec2 = context.client("ec2")
    place = {k: properties[k] for k in ("AvailabilityZone", "AvailabilityZoneId") if k in properties}
    subnet = ec2.create_subnet(VpcId=properties["VpcId"], CidrBlock=properties["CidrBlock"], **place)["Subnet"]
    public = properties.get("MapPublicIpOnLaunch") in (True, "true")
    ec2.modify_subnet_attribute(SubnetId=subnet["SubnetId"], MapPublicIpOnLaunch={"Value": public})
    _ec2_tags(context, subnet["SubnetId"], properties)
    attributes = {key: subnet[key] for key in ("AvailabilityZone", "AvailabilityZoneId", "CidrBlock", "VpcId")}
    return subnet["SubnetId"], attributes


def _update_subnet(context: Context, identifier: str, properties: Properties) -> None:
    """Changes other than tags replace the subnet. The new one comes first, so it cannot have the same addresses."""
    (subnet,) = context.client("ec2").describe_subnets(SubnetIds=[identifier])["Subnets"]
    places = ("AvailabilityZone", "AvailabilityZoneId", "CidrBlock")
    if any(properties.get(name, subnet[name]) != subnet[name] for name in places):
        message = f"The CIDR '{properties['CidrBlock']}' conflicts with another subnet"
        raise AwsError("InvalidSubnet.Conflict", message)
    _ec2_tags(context, identifier, properties)


def _delete_subnet(context: Context, identifier: str, _: Properties) -> None:
    if context.region.interfaces_in(subnet=identifier):
        raise AwsError("DependencyViolation", f"The subnet '{identifier}' has dependencies and cannot be deleted.", 400)
    context.client("ec2").delete_subnet(SubnetId=identifier)


def _internet_gateway(context: Context, properties: Properties) -> tuple[str, dict[str, Any]]:
    gateway = context.client("ec2").create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    _ec2_tags(context, gateway, properties)
    return gateway, {}


def _attachment(context: Context, properties: Properties) -> tuple[str, dict[str, Any]]:
    names = {"InternetGatewayId": properties["InternetGatewayId"], "VpcId": properties["VpcId"]}
    context.client("ec2").attach_internet_gateway(**names)
    return "IGW|" + names["VpcId"], {}


def _detach(context: Context, _: str, properties: Properties) -> None:
    names = {"InternetGatewayId": properties["InternetGatewayId"], "VpcId": properties["VpcId"]}
    context.client("ec2").detach_internet_gateway(**names)


def _eip(context: Context, properties: Properties) -> tuple[str, dict[str, Any]]:
    address = context.client("ec2").allocate_address(Domain="vpc")
    _ec2_tags(context, address["AllocationId"], properties)
    return address["PublicIp"], {"AllocationId": address["AllocationId"], "PublicIp": address["PublicIp"]}


def _release(context: Context, identifier: str, _: Properties) -> None:
    ec2 = context.client("ec2")
    found = ec2.describe_addresses(PublicIps=[identifier])["Addresses"][0]
    ec2.release_address(AllocationId=found["AllocationId"])


def _nat(context: Context, properties: Properties) -> tuple[str, dict[str, Any]]:
    ec2 = context.client("ec2")
    made = ec2.create_nat_gateway(SubnetId=properties["SubnetId"], AllocationId=properties["AllocationId"])
    identifier = made["NatGateway"]["NatGatewayId"]
    _ec2_tags(context, identifier, properties)
    return identifier, {}


def _route_table(context: Context, properties: Properties) -> tuple[str, dict[str, Any]]:
    table = context.client("ec2").create_route_table(VpcId=properties["VpcId"])["RouteTable"]["RouteTableId"]
    _ec2_tags(context, table, properties)
    return table, {}


def _route(context: Context, properties: Properties) -> tuple[str, dict[str, Any]]:
    context.client("ec2").create_route(**properties)
    return f"{properties['RouteTableId']}|{properties['DestinationCidrBlock']}", {}


def _delete_route(context: Context, identifier: str, _: Properties) -> None:
    table, destination = identifier.split("|")
    context.client("ec2").delete_route(RouteTableId=table, DestinationCidrBlock=destination)


def _association(context: Context, properties: Properties) -> tuple[str, dict[str, Any]]:
    return context.client("ec2").associate_route_table(**properties)["AssociationId"], {}


def _endpoint(context: Context, properties: Properties) -> tuple[str, dict[str, Any]]:
    policy = {"PolicyDocument": json.dumps(properties["PolicyDocument"])} if "PolicyDocument" in properties else {}
    names = ("VpcId", "ServiceName", "RouteTableIds", "VpcEndpointType")
    asked = {name: properties[name] for name in names if name in properties}
    made = context.client("ec2").create_vpc_endpoint(**asked, **policy)["VpcEndpoint"]["VpcEndpointId"]
    return made, {}


def _security_group(context: Context, properties: Properties) -> tuple[str, dict[str, Any]]:
    ec2 = context.client("ec2")
    group = ec2.create_security_group(
        GroupName=properties.get("GroupName", f"{context.stack_name}-{context.logical_id}"),
        Description=properties["GroupDescription"],
        VpcId=properties["VpcId"],
    )["GroupId"]
    if "SecurityGroupEgress" in properties:  # if given, it replaces AWS's rule that allows everything
        everything = [{"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]
        ec2.revoke_security_group_egress(GroupId=group, IpPermissions=everything)
    for rule in properties.get("SecurityGroupEgress", []):
        ec2.authorize_security_group_egress(GroupId=group, IpPermissions=[_permission(rule)])
    for rule in properties.get("SecurityGroupIngress", []):
        ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[_permission(rule)])
    _ec2_tags(context, group, properties)
    return group, {"GroupId": group, "VpcId": properties["VpcId"]}


def _permission(rule: Properties) -> dict[str, Any]:
    permission: dict[str, Any] = {"IpProtocol": str(rule["IpProtocol"])}
    if permission["IpProtocol"] != "-1":
        permission |= {"FromPort": int(rule["FromPort"]), "ToPort": int(rule["ToPort"])}
    group = rule.get("SourceSecurityGroupId") or rule.get("DestinationSecurityGroupId")
    if group:
        return {**permission, "UserIdGroupPairs": [{"GroupId": group}]}
    return {**permission, "IpRanges": [{"CidrIp": rule["CidrIp"]}]}


def _delete_security_group(context: Context, identifier: str, _: Properties) -> None:
    if context.region.interfaces_in(security_group=identifier):
        raise AwsError("DependencyViolation", f"resource {identifier} has a dependent object")
    context.client("ec2").delete_security_group(GroupId=identifier)


def _rule(direction: str) -> Kind:
    """A rule of its own; `direction`: ingress or egress, as EC2's operations are named."""

    def create(context: Context, properties: Properties) -> tuple[str, dict[str, Any]]:
        group, authorize = (
            properties["GroupId"],
            getattr(context.client("ec2"), f"authorize_security_group_{direction}"),
        )
        authorize(GroupId=group, IpPermissions=[_permission(properties)])
        return f"sgr-{group}-{direction}-{context.logical_id}", {}

    def delete(context: Context, _: str, properties: Properties) -> None:
        revoke = getattr(context.client("ec2"), f"revoke_security_group_{direction}")
        revoke(GroupId=properties["GroupId"], IpPermissions=[_permission(properties)])

    return Kind(create, delete)


NETWORK_KINDS: dict[str, Kind] = {
    "AWS::EC2::VPC": Kind(_vpc, deletion("ec2", "delete_vpc", "VpcId"), _ec2_tags),
    "AWS::EC2::Subnet": Kind(_subnet, _delete_subnet, _update_subnet),
    "AWS::EC2::InternetGateway": Kind(
        _internet_gateway, deletion("ec2", "delete_internet_gateway", "InternetGatewayId"), _ec2_tags
    ),
    "AWS::EC2::VPCGatewayAttachment": Kind(_attachment, _detach),
    "AWS::EC2::EIP": Kind(_eip, _release),
    "AWS::EC2::NatGateway": Kind(_nat, deletion("ec2", "delete_nat_gateway", "NatGatewayId"), _ec2_tags),
    "AWS::EC2::RouteTable": Kind(_route_table, deletion("ec2", "delete_route_table", "RouteTableId"), _ec2_tags),
    "AWS::EC2::Route": Kind(_route, _delete_route),
    "AWS::EC2::SubnetRouteTableAssociation": Kind(
        _association, deletion("ec2", "disassociate_route_table", "AssociationId")
    ),
    "AWS::EC2::VPCEndpoint": Kind(
        _endpoint, lambda c, i, _: c.client("ec2").delete_vpc_endpoints(VpcEndpointIds=[i]) and None
    ),
    "AWS::EC2::SecurityGroup": Kind(_security_group, _delete_security_group, _ec2_tags),
    "AWS::EC2::SecurityGroupIngress": _rule("ingress"),
    "AWS::EC2::SecurityGroupEgress": _rule("egress"),
}
