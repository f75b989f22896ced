"""The resources of a CloudFormation stack, created and deleted through the public API.

For the types of templates/cluster/. `create` returns the physical id and what Fn::GetAtt knows; `update` changes in
place, and a type without one cannot be changed here. Errors are those of the services."""

import json
from typing import Any

from tests.aws import filesystems
from tests.aws.network_resources import NETWORK_KINDS
from tests.aws.resource_kinds import Context, Kind, Properties, deletion, unique_name


def _filesystem(context: Context, properties: Properties) -> tuple[str, dict[str, Any]]:
    request = {**properties, "StorageCapacity": int(properties["StorageCapacity"])}
    lustre = dict(properties["LustreConfiguration"])
    if "PerUnitStorageThroughput" in lustre:
        lustre["PerUnitStorageThroughput"] = int(lustre["PerUnitStorageThroughput"])
    request |= {"LustreConfiguration": lustre, "Tags": context.all_tags(properties)}
    made = filesystems.create_file_system(context.region, request)["FileSystem"]
    mount_name = made["LustreConfiguration"]["MountName"]
    attributes = {"DNSName": made["DNSName"], "LustreMountName": mount_name, "ResourceARN": made["ResourceARN"]}
    return made["FileSystemId"], attributes


def _delete_filesystem(context: Context, identifier: str, _: Properties) -> None:
    filesystems.find(context.region, identifier).delete()


def _update_filesystem(context: Context, identifier: str, properties: Properties) -> None:
    lustre = dict(properties["LustreConfiguration"])
    lustre["PerUnitStorageThroughput"] = int(lustre["PerUnitStorageThroughput"])
    found = filesystems.find(context.region, identifier)
    found.update(int(properties["StorageCapacity"]), lustre)
    found.tags = context.all_tags(properties)


def _role(context: Context, properties: Properties) -> tuple[str, dict[str, Any]]:
    iam = context.client("iam")
    name = properties.get("RoleName", unique_name(context))
    trust = json.dumps(properties["AssumeRolePolicyDocument"])
    tags = [tag for tag in context.all_tags(properties) if not tag["Key"].startswith("aws:")]
    arn = iam.create_role(RoleName=name, AssumeRolePolicyDocument=trust, Tags=tags)["Role"]["Arn"]
    for policy in properties.get("ManagedPolicyArns", []):
        iam.attach_role_policy(RoleName=name, PolicyArn=policy)
    for inline in properties.get("Policies", []):
        document = json.dumps(inline["PolicyDocument"])
        iam.put_role_policy(RoleName=name, PolicyName=inline["PolicyName"], PolicyDocument=document)
    return name, {"Arn": arn, "RoleId": name}


def _delete_role(context: Context, identifier: str, _: Properties) -> None:
    iam = context.client("iam")
    for policy in iam.list_attached_role_policies(RoleName=identifier)["AttachedPolicies"]:
        iam.detach_role_policy(RoleName=identifier, PolicyArn=policy["PolicyArn"])
    for name in iam.list_role_policies(RoleName=identifier)["PolicyNames"]:
        iam.delete_role_policy(RoleName=identifier, PolicyName=name)
    iam.delete_role(RoleName=identifier)


def _update_role(context: Context, identifier: str, properties: Properties) -> None:
    iam = context.client("iam")
    trust = json.dumps(properties["AssumeRolePolicyDocument"])
    iam.update_assume_role_policy(RoleName=identifier, PolicyDocument=trust)
    for inline in properties.get("Policies", []):
        document = json.dumps(inline["PolicyDocument"])
        iam.put_role_policy(RoleName=identifier, PolicyName=inline["PolicyName"], PolicyDocument=document)


def _bucket(context: Context, properties: Properties) -> tuple[str, dict[str, Any]]:
    s3, region = context.client("s3"), context.region.name
    name = properties.get("BucketName", unique_name(context).lower())
    where = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    s3.create_bucket(Bucket=name, **where)
    _configure_bucket(context, name, properties)
    return name, {"Arn": f"arn:aws:s3:::{name}"}


def _configure_bucket(context: Context, name: str, properties: Properties) -> None:
    s3 = context.client("s3")
    if block := properties.get("PublicAccessBlockConfiguration"):
        s3.put_public_access_block(Bucket=name, PublicAccessBlockConfiguration=block)
    if encryption := properties.get("BucketEncryption"):
        (rule,) = encryption["ServerSideEncryptionConfiguration"]
        given = {"ApplyServerSideEncryptionByDefault": rule["ServerSideEncryptionByDefault"]}
        rules = [{**given, **{key: rule[key] for key in ("BucketKeyEnabled",) if key in rule}}]
        s3.put_bucket_encryption(Bucket=name, ServerSideEncryptionConfiguration={"Rules": rules})
    if versioning := properties.get("VersioningConfiguration"):
        s3.put_bucket_versioning(Bucket=name, VersioningConfiguration=versioning)
    tags = [tag for tag in context.all_tags(properties) if not tag["Key"].startswith("aws:")]
    if tags:
        s3.put_bucket_tagging(Bucket=name, Tagging={"TagSet": tags})


def _bucket_policy(context: Context, properties: Properties) -> tuple[str, dict[str, Any]]:
    # not moto's, which ignores conditions: role_access.py
    context.region.world.bucket_policies[properties["Bucket"]] = properties["PolicyDocument"]["Statement"]
    return properties["Bucket"], {}


def _update_bucket_policy(context: Context, identifier: str, properties: Properties) -> None:
    _bucket_policy(context, properties)


def _delete_bucket_policy(context: Context, identifier: str, _: Properties) -> None:
    context.region.world.bucket_policies.pop(identifier, None)


def _document(context: Context, properties: Properties) -> tuple[str, dict[str, Any]]:
    name = properties.get("Name", unique_name(context))
    context.client("ssm").create_document(
        Content=json.dumps(properties["Content"]), Name=name, DocumentType=properties.get("DocumentType", "Command")
    )
    return name, {}


def _topic(context: Context, properties: Properties) -> tuple[str, dict[str, Any]]:
    arn = context.client("sns").create_topic(Name=unique_name(context))["TopicArn"]
    _update_topic(context, arn, properties)
    return arn, {"TopicArn": arn}


def _update_topic(context: Context, identifier: str, properties: Properties) -> None:
    sns = context.client("sns")
    for old in sns.list_subscriptions_by_topic(TopicArn=identifier)["Subscriptions"]:
        sns.unsubscribe(SubscriptionArn=old["SubscriptionArn"])
    for new in properties["Subscription"]:
        sns.subscribe(TopicArn=identifier, **new)


def _topic_policy(context: Context, properties: Properties) -> tuple[str, dict[str, Any]]:
    (topic,), policy = properties["Topics"], json.dumps(properties["PolicyDocument"])
    context.client("sns").set_topic_attributes(TopicArn=topic, AttributeName="Policy", AttributeValue=policy)
    return unique_name(context), {}


def _rule(context: Context, properties: Properties) -> tuple[str, dict[str, Any]]:
    events, name = context.client("events"), unique_name(context)
    arn = events.put_rule(Name=name, EventPattern=json.dumps(properties["EventPattern"]))["RuleArn"]
    events.put_targets(Rule=name, Targets=properties["Targets"])
    return name, {"Arn": arn}


def _delete_rule(context: Context, identifier: str, properties: Properties) -> None:
    events = context.client("events")
    events.remove_targets(Rule=identifier, Ids=[target["Id"] for target in properties["Targets"]])
    events.delete_rule(Name=identifier)


KINDS: dict[str, Kind] = {
    **NETWORK_KINDS,
    "AWS::Events::Rule": Kind(_rule, _delete_rule),
    "AWS::FSx::FileSystem": Kind(_filesystem, _delete_filesystem, _update_filesystem),
    "AWS::IAM::Role": Kind(_role, _delete_role, _update_role),
    "AWS::S3::Bucket": Kind(_bucket, deletion("s3", "delete_bucket", "Bucket"), _configure_bucket),
    "AWS::S3::BucketPolicy": Kind(_bucket_policy, _delete_bucket_policy, _update_bucket_policy),
    "AWS::SNS::Topic": Kind(_topic, deletion("sns", "delete_topic", "TopicArn"), _update_topic),
    "AWS::SNS::TopicPolicy": Kind(_topic_policy, lambda *_: None),
    "AWS::SSM::Document": Kind(_document, deletion("ssm", "delete_document", "Name")),
}
