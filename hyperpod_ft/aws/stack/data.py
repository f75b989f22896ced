"""The data of a stack, its file system and its bucket: measured, and deleted only on request.

CloudFormation deletes neither (DeletionPolicy of the template). Deleting what no longer exists succeeds."""

import time
from dataclasses import dataclass
from typing import Any

from hyperpod_ft.aws.session import Session
from hyperpod_ft.aws.stack.events import DEADLINE_SECONDS
from hyperpod_ft.errors import UserError


@dataclass(frozen=True)
class FileSystem:
    """FSx for Lustre; AWS charges for `gib` at a rate that depends on `throughput` (MB/s for each TiB)."""

    id: str
    gib: int
    throughput: int
    lifecycle: str  # CREATING, AVAILABLE, MISCONFIGURED, UPDATING, DELETING, FAILED


@dataclass(frozen=True)
class Bucket:
    name: str
    objects: int
    bytes: int


def measure_filesystem(session: Session, fsx_id: str) -> FileSystem | None:
    """None if it no longer exists, or `fsx_id` is empty."""
    found = _describe(session, fsx_id) if fsx_id else None
    if found is None:
        return None
    lustre = found["LustreConfiguration"]
    return FileSystem(
        fsx_id, int(found["StorageCapacity"]), int(lustre["PerUnitStorageThroughput"]), found["Lifecycle"]
    )


def measure_bucket(session: Session, name: str) -> Bucket | None:
    """None if it no longer exists, or `name` is empty. Takes one call per thousand objects."""
    if not name:
        return None
    s3 = session.client("s3")
    objects = size = 0
    try:
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=name):
            objects += page["KeyCount"]
            size += sum(entry["Size"] for entry in page.get("Contents", []))
    except s3.exceptions.NoSuchBucket:
        return None
    return Bucket(name, objects, size)


def delete_filesystem(session: Session, fsx_id: str, poll_seconds: float) -> None:
    """Delete it and wait: until it is deleted, its network interfaces keep the subnet in use."""
    end = time.monotonic() + DEADLINE_SECONDS
    while fsx_id and (found := _describe(session, fsx_id)):
        if found["Lifecycle"] != "DELETING":
            session.client("fsx").delete_file_system(FileSystemId=fsx_id)
        if time.monotonic() > end:
            raise UserError(f"file system {fsx_id} is still {found['Lifecycle']}", "run the command again")
        time.sleep(poll_seconds)


def delete_bucket(session: Session, name: str) -> None:
    """Delete the bucket with all its objects, and their older versions in case versioning was switched on."""
    if not name:
        return
    s3 = session.client("s3")
    try:
        # always the first thousand: a marker could skip objects that are written meanwhile
        while versions := _first_versions(s3, name):
            _delete_versions(s3, name, versions)
        s3.delete_bucket(Bucket=name)
    except s3.exceptions.NoSuchBucket:
        return


def _first_versions(s3: Any, bucket: str) -> list[dict[str, Any]]:
    page = s3.list_object_versions(Bucket=bucket)
    return [*page.get("Versions", []), *page.get("DeleteMarkers", [])]


def _delete_versions(s3: Any, bucket: str, versions: list[dict[str, Any]]) -> None:
    keys = [{"Key": version["Key"], "VersionId": version["VersionId"]} for version in versions]
    answer = s3.delete_objects(Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
    for failed in answer.get("Errors", []):
        raise UserError(
            f"s3://{bucket}/{failed['Key']} cannot be deleted ({failed['Code']})",
            "allow s3:DeleteObject and s3:DeleteObjectVersion to these credentials",
        )


def _describe(session: Session, fsx_id: str) -> dict[str, Any] | None:
    fsx = session.client("fsx")
    try:
        found: dict[str, Any] = fsx.describe_file_systems(FileSystemIds=[fsx_id])["FileSystems"][0]
    except fsx.exceptions.FileSystemNotFound:
        return None
    return found
