"""Amazon FSx for Lustre: CREATING, then AVAILABLE; DELETING, then gone. (moto's: no lifecycle, no mount name.)"""

import secrets
from datetime import datetime, timezone
from typing import Any

from tests.aws.clock import Process
from tests.aws.wire import AwsError, operation
from tests.aws.world import ACCOUNT, Region

_LUSTRE_DEFAULTS = {"DataCompressionType": "NONE", "CopyTagsToBackups": False, "WeeklyMaintenanceStartTime": "1:05:00"}
_MOUNT_NAME = "abcdefghijklmnopqrstuvwxyz234567"


class FileSystem:
    def __init__(self, region: Region, request: dict[str, Any]) -> None:
        self.region = region
        self.id = f"fs-{secrets.token_hex(9)[:17]}"
        self.arn = f"arn:aws:fsx:{region.name}:{ACCOUNT}:file-system/{self.id}"
        self.lifecycle = "CREATING"
        self.created = datetime.now(timezone.utc)
        self.capacity: int = request["StorageCapacity"]
        self.subnets: list[str] = request["SubnetIds"]
        self.security_groups: list[str] = request.get("SecurityGroupIds", [])
        self.tags: list[dict[str, str]] = request.get("Tags", [])
        self.key: str = request.get("KmsKeyId", f"arn:aws:kms:{region.name}:{ACCOUNT}:key/aws-fsx")
        self.version: str = request.get("FileSystemTypeVersion", "2.15")
        mount_name = "".join(secrets.choice(_MOUNT_NAME) for _ in range(8))
        self.lustre = {**_LUSTRE_DEFAULTS, **request.get("LustreConfiguration", {}), "MountName": mount_name}
        self.interface: str = self.region.client("ec2").create_network_interface(
            SubnetId=self.subnets[0], **({"Groups": self.security_groups} if self.security_groups else {})
        )["NetworkInterface"]["NetworkInterfaceId"]
        region.filesystems[self.id] = self
        region.world.clock.start(self._created())

    @property
    def dns_name(self) -> str:
        return f"{self.id}.fsx.{self.region.name}.amazonaws.com"

    def _created(self) -> Process:
        yield self.region.seconds("fsx.create")
        self.lifecycle = "AVAILABLE"

    def delete(self) -> None:
        if self.lifecycle != "DELETING":
            self.lifecycle = "DELETING"
            self.region.world.clock.start(self._deleted())

    def _deleted(self) -> Process:
        yield self.region.seconds("fsx.delete")
        self.region.client("ec2").delete_network_interface(NetworkInterfaceId=self.interface)
        del self.region.filesystems[self.id]

    def update(self, capacity: int | None, lustre: dict[str, Any]) -> None:
        if capacity is not None and capacity != self.capacity:
            if capacity < self.capacity * 1.1:
                raise AwsError(
                    "BadRequest", f"The storage capacity must be at least 10 percent more than {self.capacity} GiB"
                )
            self.capacity = capacity
        self.lustre.update(lustre)

    def describe(self) -> dict[str, Any]:
        return {
            "OwnerId": ACCOUNT,
            "CreationTime": self.created,
            "FileSystemId": self.id,
            "FileSystemType": "LUSTRE",
            "Lifecycle": self.lifecycle,
            "StorageCapacity": self.capacity,
            "StorageType": "SSD",
            "VpcId": self.region.client("ec2").describe_subnets(SubnetIds=self.subnets)["Subnets"][0]["VpcId"],
            "SubnetIds": self.subnets,
            "NetworkInterfaceIds": [self.interface],
            "DNSName": self.dns_name,
            "ResourceARN": self.arn,
            "Tags": self.tags,
            "LustreConfiguration": self.lustre,
            "FileSystemTypeVersion": self.version,
            "KmsKeyId": self.key,
        }


def find(region: Region, identifier: str) -> FileSystem:
    if identifier not in region.filesystems:
        raise AwsError("FileSystemNotFound", f"File system '{identifier}' does not exist.")
    return region.filesystems[identifier]


@operation("fsx", "CreateFileSystem")
def create_file_system(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    lustre = request.get("LustreConfiguration", {})
    if request["FileSystemType"] != "LUSTRE":
        raise AwsError("BadRequest", "This stand-in has LUSTRE only")
    capacity = request.get("StorageCapacity", 0)
    if lustre.get("DeploymentType") == "PERSISTENT_2":
        if lustre.get("PerUnitStorageThroughput") not in (125, 250, 500, 1000):
            raise AwsError("BadRequest", "PERSISTENT_2 takes 125, 250, 500 or 1000 MB/s/TiB")
        if capacity != 1200 and (capacity % 2400 or not capacity):
            raise AwsError("BadRequest", "The storage capacity must be 1200 GiB or a multiple of 2400 GiB")
    return {"FileSystem": FileSystem(region, request).describe()}


@operation("fsx", "DescribeFileSystems")
def describe_file_systems(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    found = [find(region, identifier) for identifier in request.get("FileSystemIds", [])]
    found = found or ([] if request.get("FileSystemIds") else list(region.filesystems.values()))
    first = int(request.get("NextToken") or 0)
    size = request.get("MaxResults", 2147483647)
    page: dict[str, Any] = {"FileSystems": [f.describe() for f in found[first : first + size]]}
    if first + size < len(found):
        page["NextToken"] = str(first + size)
    return page


@operation("fsx", "UpdateFileSystem")
def update_file_system(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    filesystem = find(region, request["FileSystemId"])
    filesystem.update(request.get("StorageCapacity"), request.get("LustreConfiguration", {}))
    return {"FileSystem": filesystem.describe()}


@operation("fsx", "DeleteFileSystem")
def delete_file_system(region: Region, request: dict[str, Any]) -> dict[str, Any]:
    filesystem = find(region, request["FileSystemId"])
    filesystem.delete()
    return {"FileSystemId": filesystem.id, "Lifecycle": "DELETING"}
