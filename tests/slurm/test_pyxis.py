"""A chain whose stages run in a container, on a real Slurm, with a stand-in for Pyxis (tests/stand_ins/pyxis)."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyperpod_ft.doctor.check import Expectations, run_checks
from hyperpod_ft.doctor.containers import on_nodes
from hyperpod_ft.doctor.head_node import checks
from hyperpod_ft.findings import Finding
from hyperpod_ft.launch import container
from hyperpod_ft.launch.slurm.client import step
from hyperpod_ft.launch.slurm.site import SlurmSite
from hyperpod_ft.localcluster import LocalCluster
from hyperpod_ft.runs.records import image_state
from hyperpod_ft.runs.run import Run
from hyperpod_ft.shipped import PACKAGE
from tests.conftest import MakeRun
from tests.slurm.head import Head
from tests.slurm.test_pipeline import values

pytestmark = [pytest.mark.slurm, pytest.mark.training, pytest.mark.timeout(600)]

IMAGE = "registry.example/kit/python:3"


def _listed() -> str:
    """An image of the stand-in, with this interpreter and its system."""
    paths = ["/bin", "/usr", "/lib", "/lib64", "/etc", sys.prefix, sys.base_prefix]
    return "".join(f"{path}\n" for path in paths if Path(path).exists())


@pytest.fixture(scope="module")
def pyxis(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """plugstack.conf of the cluster's Slurm, with the stand-in; and an image of every registry."""
    directory = tmp_path_factory.mktemp("pyxis")
    (directory / "registry").write_text(_listed())
    said = subprocess.run(
        ["srun", "--version"], env=cluster.environment() | {"PATH": "/usr/bin:/bin"}, capture_output=True, check=True
    )
    numbers = [int(number) for number in re.findall(r"\d+", said.stdout.decode())]
    version = (numbers[0] << 16) + (numbers[1] << 8) + numbers[2]
    options = ["-shared", "-fPIC", f"-DSLURM_VERSION_NUMBER={version}", "-o", str(directory / "pyxis.so")]
    subprocess.run(["gcc", "-Wall", "-Werror", *options, PACKAGE.parent / "tests/stand_ins/pyxis/plugin.c"], check=True)
    conf = cluster.conf.with_name("plugstack.conf")
    conf.write_text(f"required {directory}/pyxis.so {directory}/registry\n")
    yield conf
    conf.unlink()


def test_a_chain_in_a_container(head: Head, pyxis: Path, tmp_path: Path) -> None:
    """Nothing of this machine is in it but the image, the root, and one more directory: not the checkout, not HOME."""
    del pyxis
    content = values(tmp_path / "root") | {"name": "contained", "env": {"container": IMAGE}}
    head("submit", head.write(content))
    head.wait_for_the_queue(seconds=540)
    status = head.status()
    assert {stage["state"] for stage in status["stages"]} == {"done"}, head("logs")
    run = Run.open(Path(status["directory"]))
    record = run.journal.record("env")
    assert record is not None and record.facts["container"] == IMAGE
    assert run.paths.image and run.paths.image.read_text().startswith("/bin\n"), "fetched once, for all jobs"
    assert record.facts["image"] == image_state(run.paths.image)
    assert (run.paths.environment_path / "bin" / "python").is_symlink()
    assert json.loads(run.paths.samples_path.read_text())["samples"]


def test_doctor_sees_whether_nodes_obey(cluster: LocalCluster, pyxis: Path, make_run: MakeRun, tmp_path: Path) -> None:
    """With an image and without, and with Pyxis on the head node alone: srun there accepts what nodes then ignore."""
    image = tmp_path / "image.sqsh"
    run = make_run(env={"container": str(image)})
    run.paths.directory.mkdir(parents=True)

    def found(conf: Path) -> Finding:
        expected = Expectations(run.config.root, run.config, SlurmSite({"SLURM_CONF": str(conf)}))
        (known,) = run_checks([check for check in checks(expected) if check.name == "container"])
        return known if known.verdict == "error" else next(on_nodes(expected, expected.nodes, tmp_path))

    assert found(cluster.conf).found == "partition dev: Pyxis answers; no image yet"
    image.write_text("/no/such/directory\n")
    assert "stand-in: no /no/such/directory" in found(cluster.conf).found
    image.write_text(_listed())
    assert found(cluster.conf).found == "partition dev: runs programs in it"

    head = tmp_path / "head" / "slurm.conf"
    head.parent.mkdir()
    head.write_text(cluster.conf.read_text())
    elsewhere = pyxis.rename(head.with_name(pyxis.name))
    try:
        ignored = found(head)
        assert "is ignored on node1, node2" in ignored.found and "every node" in ignored.remedy
        image.unlink()
        assert "is ignored on node1" in found(head).found
        command = [*step(container.checked(run.config, run.paths, "env")), "true"]
        done = subprocess.run(
            command, env=os.environ | {"SLURM_CONF": str(head)}, capture_output=True, text=True, check=False
        )
        assert container.telling(done.stderr) == container.IGNORED
        assert "unrecognized option '--container-image" in found(cluster.conf).found
    finally:
        elsewhere.rename(pyxis)
