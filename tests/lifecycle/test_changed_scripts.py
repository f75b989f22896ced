"""A node runs only the scripts that the cluster was given: their folder is named by the digest of their manifest."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lifecycle.cluster import Cluster
from tests.lifecycle.instances import CONTROLLER, SETTINGS
from tests.lifecycle.nodes import LIGHT, Node, container, why_not_here

pytestmark = pytest.mark.skipif(bool(why_not_here(LIGHT)), reason=why_not_here(LIGHT))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with container(tmp_path_factory.mktemp("container"), LIGHT) as opened:
        yield Cluster(opened, [CONTROLLER], tmp_path_factory.mktemp("logs")).controller


@pytest.fixture
def folder(node: Node) -> Path:
    """Where HyperPod puts what `create` uploads, as the node names it."""
    node.run("rm", "-rf", "/tmp/sagemaker-hyperpod-a57db81f4d06", "/var/log/provision")
    return node.download_uploaded("/tmp/sagemaker-hyperpod-a57db81f4d06", SETTINGS)


def provision(node: Node, folder: Path) -> tuple[int, str]:
    done = node.run("bash", f"{folder}/provision.sh", "--only", "identify", check=False)
    return done.returncode, done.stdout


def test_unchanged_scripts_run(node: Node, folder: Path) -> None:
    status, said = provision(node, folder)
    assert status == 0, said
    assert "identify: " in said


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda at: at("provision/steps/fsx.py").write_text("import os\n"), "provision/steps/fsx.py"),
        (lambda at: at("settings.json").write_text(json.dumps({**SETTINGS, "users": []})), "settings.json"),
        (lambda at: at("slurm/epilog.sh").unlink(), "slurm/epilog.sh"),
        (lambda at: at("json.py").write_text("import os\n"), "json.py"),
        (lambda at: at("provision/errors.cpython-310-x86_64-linux-gnu.so").touch(), "provision/errors.cpython-310"),
        (lambda at: at("SHA256SUMS").unlink(), "SHA256SUMS"),
    ],
    ids=["script", "settings", "missing", "added module", "added library", "no manifest"],
)
def test_changed_scripts_do_not_run(
    node: Node, folder: Path, change: Callable[[Callable[[str], Path]], None], names: str
) -> None:
    change(lambda name: node.path(f"{folder}/{name}"))
    status, said = provision(node, folder)
    assert status == 1
    assert names in said
    assert "not those that the cluster was given" in said
    assert not node.path("/var/log/provision/steps.jsonl").exists()


def test_a_manifest_that_was_changed_with_the_scripts_is_not_believed(node: Node, folder: Path) -> None:
    node.path(f"{folder}/slurm/prolog.sh").write_text("#!/bin/bash\n")
    sum_up = "find . -type f -printf '%P\\n' | xargs sha256sum >/tmp/new && mv /tmp/new SHA256SUMS"
    node.run("bash", "-c", f"cd {folder} && {sum_up}")
    status, said = provision(node, folder)
    assert (status, "not the one whose digest names this folder" in said) == (1, True)


def test_a_copy_of_another_name_may_be_edited(node: Node, folder: Path) -> None:
    node.run("rm", "-rf", "/opt/copy")
    node.run("cp", "-r", str(folder), "/opt/copy")
    with node.path("/opt/copy/provision/errors.py").open("a") as stream:
        stream.write("# mine\n")
    assert provision(node, Path("/opt/copy"))[0] == 0
