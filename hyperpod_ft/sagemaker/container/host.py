"""The host of a container among those of its training job, and the job's hyperparameters."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hyperpod_ft.errors import UserError

CODE, FSX = "code", "fsx"  # channels, below /opt/ml/input/data
VERIFIED_CODE = "/tmp/hyperpod-ft-code"  # noqa: S108 - where start.py puts what it has verified


@dataclass(frozen=True)
class Hyperparameters:
    """The launcher's parameters for a container; SageMaker requires strings."""

    job: str  # the job's name
    group: str  # of stages, for people who read the job's description
    stages: str  # to run, in order, separated by spaces
    root: str  # cluster.root: a link to channel `fsx`, or with `store` to a directory of the container
    run_directory: str
    max_runtime: str  # seconds that SageMaker gives the job
    python: str = ""  # interpreter of the stages, if the image has one
    pins: str = ""  # otherwise: requirements file below the code, for an interpreter of the container
    store: str = ""  # S3 prefix with the same tree, for jobs without a file system
    run_files: str = ""  # digest of the run's plan and scripts, which a container pulls from the store
    code: str = ""  # name of the copy of the kit's code, which ends with its digest

    @classmethod
    def read(cls, given: Mapping[str, str]) -> Hyperparameters:
        """Read a job's description or SageMaker's file. Raises TypeError when one is missing."""
        return cls(**{field.name: given[field.name] for field in fields(cls) if field.name in given})

    def as_strings(self) -> dict[str, str]:
        """The hyperparameters of CreateTrainingJob, without the empty ones."""
        return {field.name: text for field in fields(self) if (text := getattr(self, field.name))}


ML = Path("/opt/ml")
# A name may be unknown until its instance is there, and instances may start minutes apart. The limit is our choice: we
# have found none in SageMaker's documentation.
_NAME_SECONDS = 600
_MAX_FAILURE_LENGTH = 1024  # what SageMaker shows of the file


@dataclass(frozen=True)
class ContainerHost:
    """This host, its peers, and the launcher's parameters. The first host starts the stages on all hosts."""

    hosts: tuple[str, ...]  # all of the job, in the order of their numbers
    number: int  # of this host in `hosts`
    interface: str  # network device that reaches the others; empty if unknown
    parameters: Hyperparameters

    @classmethod
    def read(cls, ml: Path = ML) -> ContainerHost:
        """Read SageMaker's files. Raises UserError when one is missing or has unexpected content."""
        resources = _read(ml / "input/config/resourceconfig.json")
        try:
            # SageMaker sorts names as text: algo-10 before algo-2
            hosts = tuple(sorted(resources["hosts"], key=_natural))
            number = hosts.index(resources["current_host"])
        except (KeyError, ValueError) as error:
            raise UserError(f"{ml}/input/config/resourceconfig.json: not as expected: {error!r}") from error
        interface = resources.get("network_interface_name") or ""
        given = _read(ml / "input/config/hyperparameters.json")
        try:
            return cls(hosts, number, interface, Hyperparameters.read(given))
        except TypeError as error:
            problem = f"hyperparameters: not as expected: {error}"
            raise UserError(problem, "submit with hyperpod-ft --launcher sagemaker") from error

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def run_directory(self) -> Path:
        return Path(self.parameters.run_directory)

    def wait_for_names(self) -> None:
        """Wait until the name of every host is known. Raises UserError after ten minutes."""
        deadline = time.monotonic() + _NAME_SECONDS
        for host in self.hosts:
            while True:
                try:
                    socket.getaddrinfo(host, None)
                    break
                except OSError as error:
                    if time.monotonic() > deadline:
                        problem = f"{host}: its address is still unknown after {_NAME_SECONDS:.0f} s: {error}"
                        raise UserError(problem) from error
                time.sleep(0.5)


def link_root(root: Path, target: Path) -> None:
    """Make `target` available as cluster.root, under which every path of the run is known.

    Raises UserError when something else is there, or the user of the image may not write there.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        if root == target:
            return
        if target in root.parents:
            raise UserError(
                f"cluster.root: {root} is below {target}, which it would be a link to",
                "set cluster.root to another directory",
            )
        root.parent.mkdir(parents=True, exist_ok=True)
        if root.is_dir() and not root.is_symlink():
            root.rmdir()  # an image may have it, empty
        if not root.is_symlink():
            root.symlink_to(target)
    except OSError as error:
        raise UserError(
            f"cluster.root: cannot link {root} to {target}: {error.strerror}", "set cluster.root to another directory"
        ) from error
    if root.resolve() != target.resolve():
        raise UserError(
            f"cluster.root: {root} is a link to {root.resolve()} in this image", "set cluster.root to another directory"
        )


def write_failure_reason(reason: str, ml: Path = ML) -> None:
    """Leave the reason where SageMaker reads the job's FailureReason. The first reason stays."""
    file = ml / "output/failure"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(reason[:_MAX_FAILURE_LENGTH], encoding="utf-8")


def _natural(name: str) -> tuple[str, int]:
    text, number = re.fullmatch(r"(.*?)(\d*)", name).groups()  # type: ignore[union-attr] # it always matches
    return text, int(number or 0)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error
    return found
