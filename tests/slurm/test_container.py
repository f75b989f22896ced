"""A chain whose stages run in a container, on a real Slurm, with a stand-in for Pyxis (tests/stand_ins/pyxis)."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyperpod_ft.localcluster import LocalCluster
from hyperpod_ft.runs.run import Run
from hyperpod_ft.shipped import PACKAGE
from tests.slurm.head import Head
from tests.slurm.test_pipeline import values

pytestmark = [pytest.mark.slurm, pytest.mark.training, pytest.mark.timeout(600)]

IMAGE = "registry.example/kit/python:3"


@pytest.fixture(scope="module")
def pyxis(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """plugstack.conf of the cluster's Slurm, with the stand-in; its registry has this interpreter and its system."""
    directory = tmp_path_factory.mktemp("pyxis")
    listed = ["/bin", "/usr", "/lib", "/lib64", "/etc", sys.prefix, sys.base_prefix]
    (directory / "registry").write_text("".join(f"{path}\n" for path in listed if Path(path).exists()))
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
    assert (run.paths.environment_path / "bin" / "python").is_symlink()
    assert json.loads(run.paths.samples_path.read_text())["samples"]
