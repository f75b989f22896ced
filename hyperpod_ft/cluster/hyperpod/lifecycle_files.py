"""The files that HyperPod copies to each node and runs there: lifecycle/ and its settings."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from hyperpod_ft.aws.s3 import objects
from hyperpod_ft.aws.s3.objects import Location
from hyperpod_ft.cluster.config import ClusterConfig
from hyperpod_ft.cluster.hyperpod import requests
from hyperpod_ft.cluster.hyperpod.requests import ENTRY
from hyperpod_ft.cluster.stack.resources import ClusterResources
from hyperpod_ft.findings import Finding, error
from hyperpod_ft.shipped import shipped

PREFIX = "lifecycle"  # nodes may not write there: templates/cluster/stack.yaml
MANIFEST = "SHA256SUMS"
SETTINGS = "settings.json"
_DIGEST_DIGITS = 32  # 128 bits: infeasible to match with other files


def files(config: ClusterConfig, resources: ClusterResources) -> dict[str, bytes]:
    """The files to upload, by name relative to the S3 folder."""
    below = shipped("lifecycle")
    found = {path.relative_to(below).as_posix(): path.read_bytes() for path in scripts()}
    found[SETTINGS] = _json(requests.settings(config, resources))
    if config.provisioning == "legacy":
        found["provisioning_parameters.json"] = _json(requests.provisioning_parameters(config, resources))
    return found


def scripts() -> list[Path]:
    """The lifecycle scripts that the kit ships, sorted."""
    return sorted(path for path in shipped("lifecycle").rglob("*") if path.suffix in {".py", ".sh"} and path.is_file())


def manifest(content: dict[str, bytes]) -> bytes:
    """SHA256SUMS: the digest of each file, in the format of `sha256sum --check`."""
    lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(content.items())]
    return "".join(lines).encode()


def folder(config: ClusterConfig, content: dict[str, bytes]) -> str:
    """The S3 folder of these files, named by the digest of their manifest, so that no node reads half of a newer set.

    The cluster keeps this name (LifeCycleConfig), and nodes cannot change it: provision.sh compares its files with it.
    """
    return f"{PREFIX}/{config.name}/{_digest(manifest(content))}"


def changed(client: Any, uri: str) -> list[str]:
    """The files in a folder of S3 that are not those it is named after, sorted; [] for a folder named otherwise.

    `client`: boto3's for s3. Raises botocore's errors. Unlike a node, which runs the provision.sh that it finds there,
    this sees any change.
    """
    if not re.fullmatch(rf"[0-9a-f]{{{_DIGEST_DIGITS}}}", digest := uri.rpartition("/")[2]):
        return []
    location = Location.of(uri)
    content = {
        entry.name: client.get_object(Bucket=location.bucket, Key=entry.key)["Body"].read()
        for entry in objects.entries(client, location)
    }
    given = content.pop(MANIFEST, b"")
    if _digest(given) != digest:
        return [MANIFEST]
    differing = {*given.decode().splitlines()} ^ {*manifest(content).decode().splitlines()}
    return sorted({line.split("  ")[1] for line in differing})


def _digest(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()[:_DIGEST_DIGITS]


def check(content: dict[str, bytes]) -> list[Finding]:
    """Errors that would stop a node from running these files."""
    found = [
        error(f"lifecycle/{name}", "has Windows line endings, which bash rejects", "convert it: sed -i 's/\\r$//'")
        for name, data in sorted(content.items())
        if b"\r\n" in data
    ]
    if not content.get(ENTRY, b"").startswith(b"#!"):
        found.append(error(f"lifecycle/{ENTRY}", "is missing or has no #! line", "reinstall the kit"))
    return found


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
