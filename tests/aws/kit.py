"""`hyperpod-ft cluster ...` as users run it, against the server that stands in for AWS (server.py)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hyperpod_ft.cluster import config as cluster_config
from tests.programs import Started, start_module

if TYPE_CHECKING:
    from tests.aws.conftest import Aws

ROOT = Path(__file__).parents[2]
NAME = "ml-cluster"
WORKERS = "worker-group-1"


def start(directory: Path, environment: Mapping[str, str], *arguments: str) -> Started:
    """Start `hyperpod-ft` in a directory."""
    return start_module(directory, environment, "hyperpod_ft", *arguments)


def environment_of(aws: "Aws", home: Path) -> dict[str, str]:
    """The environment of commands that ask the stand-in, and poll it often."""
    poll = {"HYPERPOD_FT_POLL_SECONDS": "0.02"}
    return {**aws.environment, **poll, "HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class Kit:
    """The command in a directory of its own, with a cluster file and a home directory that has an ssh key."""

    def __init__(self, directory: Path, aws: "Aws") -> None:
        self.directory = directory
        self.aws = aws
        self.file = directory / "cluster.yaml"
        self.environment = environment_of(aws, directory)

    def start(self, *arguments: str, group: str = "cluster") -> Started:
        """`group`: of commands; without one, `arguments` name it."""
        return start(self.directory, self.environment, *([group] if group else []), *arguments)

    def run_any(self, *arguments: str, status: int = 0) -> str:
        """Another command than those of `hyperpod-ft cluster`."""
        return self.run(*arguments, status=status, group="")

    def run(self, *arguments: str, status: int = 0, group: str = "cluster") -> str:
        output = self.start(*arguments, group=group).finish(status)
        assert "testing" not in output.replace("testing-server", ""), "no credential is ever shown"
        return output

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json"))

    def nodes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.json("status")["nodes"]
        return found

    def workers(self) -> list[str]:
        return [node["instance_id"] for node in self.nodes() if node["group"] == WORKERS]

    def configure(self, **changes: Any) -> None:
        values = yaml.safe_load(cluster_config.example().read_text())
        self.file.write_text(yaml.safe_dump({**values, **changes}))
