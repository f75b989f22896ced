"""The files that HyperPod copies to each node and runs there: lifecycle/ and its settings."""

import hashlib
import json
from pathlib import Path
from typing import Any

from hyperpod_ft.aws.findings import Finding, error
from hyperpod_ft.aws.hyperpod import requests
from hyperpod_ft.aws.hyperpod.requests import ENTRY
from hyperpod_ft.aws.stack.cluster_resources import ClusterResources
from hyperpod_ft.config.cluster_config import ClusterConfig
from hyperpod_ft.shipped import shipped

PREFIX = "lifecycle"


def files(config: ClusterConfig, resources: ClusterResources) -> dict[str, bytes]:
    """The files to upload, by name relative to the S3 folder."""
    below = shipped("lifecycle")
    found = {path.relative_to(below).as_posix(): path.read_bytes() for path in scripts()}
    found["settings.json"] = _json(requests.settings(config, resources))
    if config.provisioning == "legacy":
        found["provisioning_parameters.json"] = _json(requests.provisioning_parameters(config, resources))
    return found


def scripts() -> list[Path]:
    """The lifecycle scripts that the kit ships, sorted."""
    return sorted(path for path in shipped("lifecycle").rglob("*") if path.suffix in {".py", ".sh"} and path.is_file())


def folder(config: ClusterConfig, content: dict[str, bytes]) -> str:
    """The S3 folder of these files. Its name holds their digest, so that no node ever reads half of a newer set."""
    digest = hashlib.sha256()
    for name, data in sorted(content.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return f"{PREFIX}/{config.name}/{digest.hexdigest()[:12]}"


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
