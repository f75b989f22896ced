"""Whole buckets: where one is, what it holds, and its deletion.

`client` is boto3's for s3 throughout. Raises botocore's errors.
"""

from dataclasses import dataclass
from typing import Any

from hyperpod_ft.aws.session import error_code
from hyperpod_ft.errors import UserError


@dataclass(frozen=True)
class Bucket:
    """A bucket, the number of its objects and their size in bytes."""

    name: str
    objects: int
    bytes: int


def region(client: Any, name: str) -> str:
    """The region of a bucket; empty if S3 does not report it."""
    try:
        answer = client.head_bucket(Bucket=name)
    except client.exceptions.ClientError as error:
        if error_code(error) != "301":
            raise
        return _region_header(error.response) or "another region"
    return str(answer.get("BucketRegion") or _region_header(answer))


def measure(client: Any, name: str) -> Bucket | None:
    """What a bucket holds; None if it no longer exists, or `name` is empty. Takes one call per thousand objects."""
    if not name:
        return None
    objects = size = 0
    try:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=name):
            objects += page["KeyCount"]
            size += sum(entry["Size"] for entry in page.get("Contents", []))
    except client.exceptions.NoSuchBucket:
        return None
    return Bucket(name, objects, size)


def delete(client: Any, name: str) -> None:
    """Delete the bucket with all its objects, and their older versions in case versioning was switched on.

    Succeeds if it no longer exists, or `name` is empty.
    """
    if not name:
        return
    try:
        # always the first thousand: a marker could skip objects that are being written
        while versions := _first_versions(client, name):
            _delete_versions(client, name, versions)
        client.delete_bucket(Bucket=name)
    except client.exceptions.NoSuchBucket:
        return


def _region_header(answer: dict[str, Any]) -> str:
    headers: dict[str, str] = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return headers.get("x-amz-bucket-region", "")


def _first_versions(client: Any, bucket: str) -> list[dict[str, Any]]:
    page = client.list_object_versions(Bucket=bucket)
    return [*page.get("Versions", []), *page.get("DeleteMarkers", [])]


def _delete_versions(client: Any, bucket: str, versions: list[dict[str, Any]]) -> None:
    keys = [{"Key": version["Key"], "VersionId": version["VersionId"]} for version in versions]
    answer = client.delete_objects(Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
    for failed in answer.get("Errors", []):
        raise UserError(
            f"s3://{bucket}/{failed['Key']} cannot be deleted ({failed['Code']})",
            "grant these credentials s3:DeleteObject and s3:DeleteObjectVersion",
        )
