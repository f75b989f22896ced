"""docs/first-run-slurm.md, typed once for GPUs and once for Trainium, by a user on the head node of a cluster.

For GPUs, the directory is not the home, and the kit is installed as on docs/first-run-gpu.md.

Genuine: what lifecycle/ made of the nodes, Slurm, pip and venv, the kit. Stand-ins, besides those of image.py: apt-get,
which brings back this machine's ensurepip; curl, which writes rows like GSM8K's; the package index, which has each
package of the tests' environment without its files; hatchling, which packs the same files, and a way to those packages.
The editor types what the page shows. The run that is submitted has a small model and trains on CPUs.
"""

import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from tests.lifecycle.cluster import USER, Cluster
from tests.lifecycle.instances import CONTROLLER, LOGIN, WORKERS
from tests.lifecycle.nodes import Node, container
from tests.pages.blocks import ROOT, uncommented
from tests.pages.blocks import blocks as page_blocks
from tests.pages.reader import CURL, EDITOR, clone
from tests.unit.wheels import wheel

pytestmark = [pytest.mark.lifecycle, pytest.mark.timeout(1800)]

PAGE = "docs/first-run-slurm.md"
ENSUREPIP = Path(f"/usr/lib/python{sysconfig.get_python_version()}/ensurepip")
PACKAGES = sysconfig.get_path("purelib")
STAND_INS = Path("/opt/stand-ins")
APT_GET = f"""\
#!/bin/sh
case "$*" in *" python3-venv"*) cp -a {STAND_INS}/ensurepip {ENSUREPIP} ;; esac
"""
BACKEND = """\
import zipfile
from pathlib import Path

def build_wheel(directory, settings=None, metadata=None):
    name = "hyperpod_ft-{version}-py3-none-any.whl"
    with zipfile.ZipFile(Path(directory, name), "w") as archive:
        for top in ("hyperpod_ft", "templates", "examples", "lifecycle"):
            for path in Path(top).rglob("*"):
                archive.write(path, path if top == "hyperpod_ft" else Path("hyperpod_ft", path))
        for file, text in {files!r}.items():
            archive.writestr("hyperpod_ft-{version}.dist-info/" + file, text)
        archive.writestr("packages-of-the-tests.pth", "{packages}")
    return name
"""
SMALL = """
engine: torch
env: {python: current, package_repositories: []}
cluster: {instance_type: c5.xlarge, partition: trn1, cpus_per_cpu_stage: 2}
model: {source: "example:tiny-llama"}
dataset: {max_length: 256}
training: {max_steps: 3, precision: fp32, micro_batch_size: 1, gradient_accumulation_steps: 1}
parallelism: {tensor_parallel: 1, ranks_per_node: 1}
generate: {train_samples: 1, validation_samples: 1, max_new_tokens: 2}
"""


def without_comments(block: str) -> str:
    return re.sub(r" +# .*$", "", block, flags=re.MULTILINE)


def why_not() -> str:
    python = subprocess.run(["/usr/bin/python3", "--version"], capture_output=True, text=True, check=False).stdout
    if f"Python {sysconfig.get_python_version()}." not in python or not ENSUREPIP.is_dir():
        return "nodes run the system's Python, with the packages of the tests' one: they must be alike, with ensurepip"
    return ""


@pytest.fixture(scope="module")
def head(nodes_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """The login node of a cluster that lifecycle/ has set up, with the kit's source in a user's home."""
    if reason := why_not():
        pytest.skip(reason)
    with container(tmp_path_factory.mktemp("container")) as opened:
        opened.packages = PACKAGES
        cluster = Cluster(opened, [CONTROLLER, *WORKERS, LOGIN], tmp_path_factory.mktemp("logs"))
        cluster.provision(cluster.nodes)
        node = cluster.nodes[-1]
        _write_stand_ins(node)
        clone(node.path(f"/fsx/{USER}/hyperpod-ft-src"), without="tests/")
        node.run("chown", "-R", f"{USER}:", f"/fsx/{USER}/hyperpod-ft-src")
        yield node


def _write_stand_ins(node: Node) -> None:
    for name, text in (
        ("usr/local/sbin/apt-get", APT_GET),
        ("usr/local/bin/editor", EDITOR),
        ("usr/local/bin/curl", CURL),
    ):
        (node.root / name).write_text(text)
        (node.root / name).chmod(0o755)
    shutil.copytree(ENSUREPIP, node.path(f"{STAND_INS}/ensurepip"))
    index = node.path(f"{STAND_INS}/index")
    kit = metadata.distribution("hyperpod-ft")
    files = {
        "METADATA": kit.read_text("METADATA"),
        "entry_points.txt": kit.read_text("entry_points.txt"),
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    backend = BACKEND.format(version=kit.version, files=files, packages=f"{STAND_INS}/packages")
    wheel(index, "hatchling", "1.27.0", {"hatchling/build.py": backend})
    wheel(index, "uv", "0.9.0", {})
    names = {one.name.lower().replace("_", "-"): one.version for one in metadata.distributions(path=[PACKAGES])}
    for name, version in names.items():
        if name not in ("hyperpod-ft", "pip", "hatchling", "uv"):
            wheel(index, name, version, {})
    places = " ".join(f"{STAND_INS}/index/{directory.name}" for directory in index.iterdir())
    (node.root / "etc/pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {places}\n")


def as_user(node: Node, commands: str, typed: str = "", status: int = 0) -> str:
    """The output of commands of a login shell that stops at the first failure; `typed` is what the editor types."""
    script = f"set -e\nexport EDITOR=editor OMP_NUM_THREADS=1\n{commands}"
    done = node.run("bash", "-lc", script, user=USER, environment={"TYPED": typed} if typed else None, check=False)
    shown = done.stdout + done.stderr
    assert done.returncode == status, shown
    assert "Traceback" not in shown, shown
    return shown


def typed_by_a_user(head: Node, base: str, instance: str) -> tuple[str, str]:
    """Type the page's blocks, with a directory for all files; returns what the check and the training printed.

    The training has a small model.

    For GPUs, stages run on this node before the others, as they do where others have no network.
    """
    _, install, get, init, edit, check, offline, submit, use = map(without_comments, page_blocks(PAGE))
    (typed,) = page_blocks(PAGE, "yaml")
    typed = typed.replace("partition: p5", "partition: trn1")  # the name of the cluster's only nodes
    typed = typed.replace("~/", f"{base}/")
    shell, _, install = install.replace("BASE=~", f"BASE={base}").partition("\n")
    if instance.startswith("trn1"):
        init, typed = init.replace("p5.48xlarge", instance), uncommented(typed)
        by_root = [line.replace("sudo ", "") for line in install.splitlines() if "sudo" in line]
        head.run("bash", "-lc", "\n".join(["set -e", *by_root]))
        install = "\n".join(line for line in install.splitlines() if "sudo" not in line)
    else:
        of_gpus = without_comments(page_blocks("docs/first-run-gpu.md")[0]).replace("~/", "$BASE/")
        install = f"{install.splitlines()[0]}\n{of_gpus}"
        submit = f"{offline}\n{submit}"
    as_user(head, f"{shell}\n{install}")
    shell += "\nexport PATH=$BASE/kit/bin:$PATH"
    as_user(head, f"{shell}\n{get}{init}{edit}", typed)
    shell += "\ncd $BASE/first-run"
    tolerant = re.sub(r"^(hyperpod-ft doctor .*)$", r"\1 || [ $? = 1 ]", check, flags=re.MULTILINE)
    shown = as_user(head, f"{shell}\n{tolerant}")
    return shown, as_user(head, f"{shell}\n$EDITOR run.yaml\n{submit}\n{use}", SMALL)


def test_trainium(head: Node) -> None:
    assert "ensurepip" in as_user(head, "python3 -m venv ~/kit", status=1)
    as_user(head, "rm -r ~/kit")
    shown, trained = typed_by_a_user(head, "~", "trn1.32xlarge")
    assert "idle" in shown, shown
    for row in (
        *("cluster.root +ok", "locks +ok", "partitions +ok: partition trn1 has 2 nodes", "accounting +ok: slurmdbd"),
        *("node ip-10-1-0-12 +ok: volume, locks", "node ip-10-1-0-13 +ok: volume, locks"),
        # what these nodes do not have
        "packages +differs: cannot reach https://pip.repos.neuron.amazonaws.com, https://download.pytorch.org",
        "jobs +differs: sbatch refuses dataset, generate",  # more than 4 CPUs
        "health +differs: ip-10-1-0-12: 0 of 16 device files",
    ):
        assert re.search(row, shown), f"{row}\n{shown}"
    assert re.search(r"^ranks +1 x trn1.32xlarge, 32 per node = 32", shown, re.MULTILINE), shown
    assert re.search(r"generate +done", trained), trained
    assert re.search(r"hyperpod-ft/runs/qwen3-8b-questions-lora/\S+/merged", trained), trained


def test_gpus(head: Node) -> None:
    """In a directory of the page's making, in which nothing was installed."""
    base = f"/fsx/{USER}-second"
    text = (ROOT / PAGE).read_text(encoding="utf-8").replace("/fsx/DIRECTORY", base)
    make = re.search(rf"`sudo (install -d [^`]*{base})`", text)
    assert make
    head.run("bash", "-lc", make[1].replace("$USER", USER))
    shown, trained = typed_by_a_user(head, base, "p5.48xlarge")
    assert re.search(r"node ip-10-1-0-12 +ok: volume, locks", shown), shown
    assert re.search(r"^ranks +1 x p5.48xlarge, 8 per node = 8", shown, re.MULTILINE), shown
    assert re.search(r"generate +done", trained), trained
