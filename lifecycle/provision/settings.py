"""settings.json, which the kit writes from the cluster file next to these scripts."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

from provision.errors import NodeError

ROLES = ("controller", "login", "compute")
PROVISIONING = ("api", "legacy")
# What useradd takes by default; it also keeps a name from being read as an option or a path.
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*", re.ASCII)
_MOUNT_NAME = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
# One line of authorized_keys: kind, base64, comment; no options before them.
_PUBLIC_KEY = re.compile(r"(ssh|ecdsa|sk)-[a-z0-9@.-]+ [A-Za-z0-9+/]+={0,2}( [^\x00-\x1f\x7f]*)?")
_MOUNT_PATH = re.compile(r"(/[A-Za-z0-9_][A-Za-z0-9._-]*)+", re.ASCII)


@dataclass(frozen=True)
class FsxSettings:
    """FSx for Lustre: `dns_name`@tcp:/`mount_name` at `mount_path`."""

    dns_name: str
    mount_name: str
    mount_path: str

    @property
    def source(self) -> str:
        """The source argument of mount."""
        return f"{self.dns_name}@tcp:/{self.mount_name}"


@dataclass(frozen=True)
class User:
    """A user of the cluster. The group has the user's name."""

    name: str
    uid: int
    gid: int
    public_keys: tuple[str, ...]
    """Lines of authorized_keys."""


@dataclass(frozen=True)
class Settings:
    """The settings of the cluster file that nodes need."""

    provisioning: str
    """`api`: HyperPod sets up Slurm and mounts /fsx; `legacy`: these steps do."""
    default_user: str
    fsx: FsxSettings
    groups: Mapping[str, str]
    """Role (one of ROLES) of each instance group."""
    users: tuple[User, ...]
    accounting: bool


def read_settings(file: Path) -> Settings:
    """Raises NodeError that names the file and the key when something is missing, unknown or not of its form."""
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise NodeError(f"{file}: {error}", "upload the lifecycle scripts again") from None
    try:
        return _settings(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise NodeError(f"{file}: {what}", "upload the lifecycle scripts again with the kit that wrote it") from None


def _settings(data: Mapping[str, Any]) -> Settings:
    if data["version"] != 1:
        raise ValueError(f"version {data['version']!r}; these scripts read version 1")
    fsx = data["fsx"]
    return Settings(
        provisioning=_one_of("provisioning", data["provisioning"], PROVISIONING),
        default_user=_matching("default_user", data["default_user"], _USER),
        fsx=FsxSettings(
            dns_name=_matching("fsx.dns_name", fsx["dns_name"], _HOST),
            mount_name=_matching("fsx.mount_name", fsx["mount_name"], _MOUNT_NAME),
            mount_path=_matching("fsx.mount_path", fsx["mount_path"], _MOUNT_PATH),
        ),
        groups={name: _one_of(f"groups.{name}", role, ROLES) for name, role in data["groups"].items()},
        users=tuple(
            User(
                _matching("users.name", user["name"], _USER),
                _id("users.uid", user["uid"]),
                _id("users.gid", user["gid"]),
                tuple(_matching("users.public_keys", key, _PUBLIC_KEY) for key in user["public_keys"]),
            )
            for user in data["users"]
        ),
        accounting=_yes_no("accounting", data["accounting"]),
    )


def _matching(key: str, value: Any, pattern: re.Pattern[str]) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{key}: {value!r} is not of the form {pattern.pattern}")
    return value


def _one_of(key: str, value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"{key}: {value!r} is not one of {', '.join(known)}")
    return str(value)


def _id(key: str, value: Any) -> int:
    if type(value) is not int or not 0 < value < 2**32 - 1:
        raise ValueError(f"{key}: {value!r} is not a valid id")
    return value


def _yes_no(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{key}: {value!r} is neither true nor false")
    return value
