"""Environments for Trainium: the real venv and pip, on tiny wheels from package indexes on the loopback device.

The wheels and `uv` are stand-ins: the real Neuron packages are hundreds of megabytes, and uv needs the network.
"""

import functools
import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hyperpod_ft.config.sections.cluster import PythonEnvironment
from hyperpod_ft.environments import installation, interpreters
from hyperpod_ft.environments.installation import build
from hyperpod_ft.environments.interpreters import check_torch, probe
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch import torch_neuron
from hyperpod_ft.planning.neuron import rules as neuron_rules
from hyperpod_ft.planning.pins import PYTHON_VERSIONS, from_neuron_repositories, read_pins, requirements
from hyperpod_ft.planning.torch import rules as torch_rules
from hyperpod_ft.runs.run import Run
from tests.unit.wheels import wheel

MakeRun = Callable[..., Run]
NEURON = {"torch": "2.8.0", "neuronx-cc": "2.21", "libneuronxla": "2.2", "torch-neuronx": "2.8", "nki": "0.2"}
PINS = "".join(f"{name}=={version}\n" for name, version in NEURON.items()) + "# a comment\nothers[training]==1.0\n"
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
IMPORTS = ("torch", "neuronxcc", "libneuronxla", "torch_neuronx", "nki", "others")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def indexes(tmp_path: Path) -> Iterator[str]:
    """URL of a server: /aws and /cpu hold the Neuron packages and torch, /pypi the others and placeholders."""
    root = tmp_path / "indexes"
    for name, version in NEURON.items():
        module = {"neuronx-cc": "neuronxcc"}.get(name, name.replace("-", "_"))
        files = {f"{module}/__init__.py": "from . import version\n" if name == "torch" else ""}
        if name == "torch":
            files["torch/version.py"] = "cuda = None\n"
            wheel(root / "cpu", name, f"{version}+cpu", files)
            wheel(root / "cuda", name, version, {**files, "torch/version.py": "cuda = '12.8'\n"})
        else:
            wheel(root / "aws", name, version, files)
            # newer to pip than AWS's own, and fitting the pin
            wheel(root / "pypi", name, f"{version}+evil", {f"{name.replace('-', '_')}_placeholder.py": ""})
    wheel(root / "pypi", "others", "1.0", {"others.py": ""}, ("torch==2.8.*", "torch-neuronx"))
    wheel(root / "pypi", "torch", "2.8.0", {"torch/__init__.py": "", "torch/version.py": "cuda = '12.8'\n"})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(root)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def _pips_own_configuration(indexes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a node's pip.conf would say: its own index, and nothing of this machine's."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{indexes}/pypi")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "300")  # the index is a thread of this process
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def pins(tmp_path: Path) -> Path:
    path = tmp_path / "pins.txt"
    path.write_text(PINS)
    return path


@pytest.fixture(scope="module")
def empty_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment to copy: to make one takes seconds."""
    directory = tmp_path_factory.mktemp("empty") / "venv"
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    return directory


@pytest.fixture
def python(empty_environment: Path, tmp_path: Path) -> Path:
    """The interpreter of an empty virtual environment."""
    shutil.copytree(empty_environment, tmp_path / "venv", symlinks=True)
    return tmp_path / "venv" / "bin" / "python"


def test_the_neuron_packages_come_from_their_repositories_alone(
    tmp_path: Path, indexes: str, pins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PYTHON_VERSIONS, "neuron", (HERE,))
    environment = tmp_path / "envs" / "0123"
    build(pins, environment, "neuron", (f"{indexes}/aws", f"{indexes}/cpu"))
    found = probe(environment / "bin" / "python", IMPORTS, "")["packages"]
    assert {name: found[name] for name in NEURON} == {**NEURON, "torch": "2.8.0+cpu"}
    assert found["others"] == "1.0"
    assert [path.name for path in environment.parent.iterdir()] == ["0123"]


def test_a_directory_of_wheels_is_a_repository(tmp_path: Path, python: Path, pins: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for index in ("aws", "cpu"):
        for path in (tmp_path / "indexes" / index).glob("*/*.whl"):
            (wheels / path.name).symlink_to(path)
    installation.install_neuron(python, pins, (str(wheels),))
    assert "+evil" not in "".join(probe(python, IMPORTS, "")["packages"].values())


def test_placeholders_from_pypi_are_noticed(python: Path, indexes: str, pins: Path) -> None:
    pins.write_text("neuronx-cc==2.21\n")
    wheel_of_torch = f"{indexes}/cpu/torch/torch-2.8.0+cpu-py3-none-any.whl"
    subprocess.run([python, "-m", "pip", "install", "-q", wheel_of_torch], check=True)
    installation.install_neuron(python, pins, ())
    with pytest.raises(UserError, match="cannot import neuronxcc: ModuleNotFoundError"):
        probe(python, ("neuronxcc",), "")


def test_a_torch_for_cuda_is_refused_before_the_rest_is_installed(python: Path, indexes: str, pins: Path) -> None:
    with pytest.raises(UserError, match=r"CUDA 12\.8.*CPU builds.*env\.package_repos"):
        installation.install_neuron(python, pins, (f"{indexes}/aws", f"{indexes}/cuda"))
    with pytest.raises(UserError, match="cannot import others"):
        probe(python, ("others",), "")


def test_a_package_that_is_not_there_and_a_repository_that_is_not_reached(
    python: Path, indexes: str, pins: Path
) -> None:
    with pytest.raises(UserError, match=rf"torch==2\.8\.0 is not in {indexes}/aws; check env\.package_repositories"):
        installation.install_neuron(python, pins, (f"{indexes}/aws",))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/simple"
        with pytest.raises(UserError, match=rf"cannot reach {url}: .*connection broken by"):
            installation.install_neuron(python, pins, (url,))
    with pytest.raises(UserError, match=r"/no/such/wheels: .*Location"):
        installation.install_neuron(python, pins, ("/no/such/wheels",))


def test_a_full_disk_is_named() -> None:
    message = "Collecting torch\nERROR: Could not install packages: [Errno 28] No space left on device\n"
    assert str(installation.failure(message, "it")).startswith("pip install failed: no space left;")


def test_too_little_disk_is_seen_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(interpreters.shutil, "disk_usage", lambda _: usage(int(1e12), 0, int(9e9)))
    with pytest.raises(UserError, match=r"9\.0 GB free; .* 10 GB"):
        interpreters.create_environment(tmp_path / "venv", tmp_path, ("3.11",))
    assert not (tmp_path / "venv").exists()


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def old_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node whose only Pythons are of other versions, or cannot make environments; gives its directory of programs."""
    programs = tmp_path / "programs"
    monkeypatch.setattr(interpreters, "ENVIRONMENT_GB", 0)
    monkeypatch.setattr(sys, "executable", str(script(programs / "python3.9", "echo 3.9")))
    script(programs / "python3.11", "echo 3.11; exit 1 # stands in for a Python without ensurepip")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(interpreters.shutil, "which", functools.partial(interpreters.shutil.which, path=str(programs)))
    return programs


def test_no_python_that_fits(tmp_path: Path, old_python: Path) -> None:
    with pytest.raises(UserError, match=r"no Python 3\.11 or 3\.10 .*no uv"):
        interpreters.create_environment(tmp_path / "venv", tmp_path, ("3.11", "3.10"))


def test_uv_fetches_a_python_onto_the_shared_volume(tmp_path: Path, old_python: Path) -> None:
    script(old_python / "uv", f'printf "%s\\n" "$UV_PYTHON_INSTALL_DIR" "$UV_PYTHON_PREFERENCE" "$@" >{tmp_path}/asked')
    interpreters.create_environment(tmp_path / "venv", tmp_path / "envs", ("3.11", "3.10"))
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[:2] == [str(tmp_path / "envs" / "python"), "only-managed"]
    assert asked[2:] == ["venv", "--quiet", "--seed", "--python", "3.11", str(tmp_path / "venv")]


def test_uv_makes_an_environment_of_a_python_without_ensurepip(tmp_path: Path, old_python: Path) -> None:
    """As HyperPod's images have it."""
    script(Path(sys.executable), "exit 1")
    with pytest.raises(UserError, match=r"no ensurepip .* pip install uv"):
        interpreters.create_with(Path(sys.executable), tmp_path / "venv")
    script(old_python / "uv", f'printf "%s\\n" "$@" >{tmp_path}/asked')
    interpreters.create_with(Path(sys.executable), tmp_path / "venv")
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["venv", "--quiet", "--seed", "--python", sys.executable, str(tmp_path / "venv")]


def test_both_sdks_pin_every_neuron_package(make_run: MakeRun) -> None:
    neuron = {"engine": "neuron", "cluster__instance_type": "trn1.32xlarge", "parallelism": {"tensor_parallel": 8}}
    for sdk in ("2.26.1", "2.28.0"):
        name = neuron_rules.environment_name(make_run(**neuron, env={"sdk": sdk}).config)
        pinned = from_neuron_repositories(requirements(name))
        assert name == f"neuron-{sdk}"
        assert {pin.split("==")[0] for pin in pinned} - {"nki"} == {
            *("libneuronxla", "neuronx-cc", "neuronx-distributed", "torch", "torch-neuronx")
        }
    assert torch_rules.environment_name(make_run().config) == "torch"
    assert from_neuron_repositories(requirements("torch"))[0].startswith("torch==")


@pytest.mark.parametrize("value", ["https://user:word@example.org/simple", "ftp://example.org", "wheels"])
def test_what_is_no_package_repository_is_refused(make_run: MakeRun, value: str) -> None:
    with pytest.raises(UserError, match=r"env\.package_repositories"):
        make_run(env={"package_repositories": [value]})


def test_torch_neuron_is_installed_from_its_repositories(
    tmp_path: Path, indexes: str, pins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine torch on Trainium, on a node without AWS's own environment."""
    monkeypatch.setitem(PYTHON_VERSIONS, "torch-neuron", (HERE,))
    monkeypatch.setattr(torch_neuron, "of_machine_image", lambda: None)
    build(pins, tmp_path / "envs" / "0123", "torch-neuron", (f"{indexes}/aws", f"{indexes}/cpu"))
    found = probe(tmp_path / "envs" / "0123" / "bin" / "python", ("torch_neuronx", "others"), "")["packages"]
    assert (found["torch-neuronx"], found["torch"]) == ("2.8", "2.8.0+cpu")


def test_an_image_with_torch_neuron_gives_its_packages(
    tmp_path: Path, indexes: str, pins: Path, empty_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest environment of AWS's image is under the kit's, where only the other packages are installed."""
    images = tmp_path / "opt"
    script(images / "aws_neuronx_venv_torch_neuronx_2_9_0" / "bin" / "python", "exit 1 # it is not the newest")
    shutil.copytree(empty_environment, images / "aws_neuronx_venv_torch_neuronx_2_14_0", symlinks=True)
    image = torch_neuron.of_machine_image(images)
    assert image and image.parts[-3] == "aws_neuronx_venv_torch_neuronx_2_14_0"
    installation.install_neuron(image, _only_neuron(pins), (f"{indexes}/aws", f"{indexes}/cpu"))
    monkeypatch.setattr(torch_neuron, "of_machine_image", lambda: image)
    build(pins, tmp_path / "envs" / "0123", "torch-neuron")
    environment = tmp_path / "envs" / "0123"
    found = probe(environment / "bin" / "python", ("torch", "torch_neuronx", "others"), "")["packages"]
    assert {name: found[name] for name in NEURON} == {**NEURON, "torch": "2.8.0+cpu"}
    own = {path.name for path in environment.glob("lib/python*/site-packages/*") if path.suffix != ".dist-info"}
    assert "others.py" in own and "torch" not in own


def _only_neuron(pins: Path) -> Path:
    path = pins.with_name("neuron-only.txt")
    path.write_text("\n".join(from_neuron_repositories(read_pins(pins))))
    return path


@pytest.mark.parametrize(
    ("python", "torch", "plugin", "problem"),
    [
        ("3.12.3", "2.13.0+cpu", "2.13.3.0.5", ""),
        ("3.14.0", "2.14.0", "2.14.3.0.1", ""),
        ("3.11.9", "2.13.0", "2.13.3.0.5", r"Python 3\.11\.9, and TorchNeuron needs 3\.12"),
        ("3.12.3", "2.9.1", "2.9.0.2.15", r"torch 2\.9\.1, and TorchNeuron needs 2\.13"),
        ("3.12.3", "2.13.0", "2.14.3.0.1", "which are different versions"),
        ("3.12.3", "2.13.0", None, "torch-neuronx none"),
    ],
)
def test_what_is_no_torch_neuron_is_refused_in_one_line(
    python: str, torch: str, plugin: str | None, problem: str
) -> None:
    packages = {"torch": torch} | ({"torch-neuronx": plugin} if plugin else {})
    found, env = {"python": python, "packages": packages}, PythonEnvironment(python="/x/python")
    if not problem:
        check_torch(Path("/x/python"), found, env, neuron=True, sharded_experts=False)
        return
    with pytest.raises(UserError, match=problem) as refused:
        check_torch(Path("/x/python"), found, env, neuron=True, sharded_experts=False)
    assert str(refused.value).endswith("; set env.python to another interpreter, or leave it out")
    assert "\n" not in str(refused.value)
    for env, way in (
        (PythonEnvironment(), "set env.python to another interpreter"),  # that of AWS's machine image
        (PythonEnvironment(container="a/b:1"), "set env.container to another image than a/b:1"),
    ):
        with pytest.raises(UserError, match=f"; {way}$"):
            check_torch(Path("/x/python"), found, env, neuron=True, sharded_experts=False)
