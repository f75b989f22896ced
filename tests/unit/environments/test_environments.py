"""Virtual environments: a built one works under its final name, a failure leaves nothing, an interpreter is asked."""

import subprocess
import sys
from pathlib import Path

import pytest

from hyperpod_ft.config.sections.cluster import PythonEnvironment
from hyperpod_ft.environments import installation, interpreters
from hyperpod_ft.environments.installation import build, build_inside, build_on_top_of
from hyperpod_ft.environments.interpreters import check_torch, probe
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.pins import PYTHON_VERSIONS
from tests.programs import write_program
from tests.unit.wheels import wheel


@pytest.fixture(autouse=True)
def _no_package_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.mark.parametrize("kind", ["torch", "trl"])
def test_a_built_environment_works_under_its_final_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setitem(PYTHON_VERSIONS, "trl", (f"{sys.version_info.major}.{sys.version_info.minor}",))
    monkeypatch.setattr(interpreters, "ENVIRONMENT_GB", 0)
    files = {
        "tiny.py": "def main(): print('tiny works')\n",
        "tiny-1.2.dist-info/entry_points.txt": "[console_scripts]\ntiny = tiny:main\n",
    }
    wheel(tmp_path, "tiny", "1.2", files)
    pins = tmp_path / "pins.txt"
    pins.write_text(f"{tmp_path}/tiny/tiny-1.2-py3-none-any.whl\n")
    environment = tmp_path / "envs" / "0123"
    build(pins, environment, kind)
    assert [path.name for path in environment.parent.iterdir()] == ["0123"]
    done = subprocess.run([environment / "bin" / "tiny"], capture_output=True, text=True, check=True)
    assert done.stdout == "tiny works\n"
    assert probe(environment / "bin" / "python", ("tiny",), "")["packages"]["tiny"] == "1.2"


def test_packages_that_cannot_be_installed_leave_nothing(tmp_path: Path) -> None:
    pins = tmp_path / "pins.txt"
    pins.write_text(f"{tmp_path / 'nothing'}\n")
    with pytest.raises(UserError, match="pip install failed"):
        build(pins, tmp_path / "envs" / "0123")
    assert list((tmp_path / "envs").iterdir()) == []


def test_what_pip_unpacks_in_a_container_is_on_the_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, /tmp is memory. srun keeps its own directory, where its plugin unpacks images."""
    program = tmp_path / "python3"
    write_program(program, 'mkdir -p "$(dirname "$3")"; ls -d "$TMPDIR" >"$3"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    build_inside(["env", "-u", "TMPDIR"], tmp_path / "pins.txt", tmp_path / "envs" / "inside")
    monkeypatch.setattr(interpreters, "create_on_top_of", lambda _, partial: (partial / "bin").mkdir())
    monkeypatch.setattr(installation, "_run_pip", lambda python, *_, temporary, **__: _ls(python, temporary))
    build_on_top_of(program, tmp_path / "pins.txt", tmp_path / "envs" / "above")
    for name in ("inside", "above"):
        environment = tmp_path / "envs" / name
        used = Path((environment / "bin" / "python").read_text().strip())
        assert used.parent.parent == environment.parent and not (environment / used.name).exists()


def _ls(python: Path, temporary: str) -> subprocess.CompletedProcess[str]:
    python.write_text(temporary if Path(temporary).is_dir() else "")
    return subprocess.CompletedProcess([], 0, "", "")


def test_an_interpreter_that_lacks_a_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot import no_such_package: ModuleNotFoundError.*; install it$"):
        probe(Path(sys.executable), ("no_such_package",), "install it")
    with pytest.raises(UserError, match=r"cannot run .*: No such file"):
        probe(tmp_path / "python", (), "")


@pytest.mark.parametrize(
    ("torch", "sharded_experts", "outcome"),
    [
        ("2.10.1+cu130", False, r"/x/python has torch 2\.10\.1\+cu130, and engine torch needs 2\.11 or newer"),
        ("2.11.0+cu130", False, ""),
        ("2.11.0+cu130", True, r"torch 2\.11\.0\+cu130, and sharding divided experts needs 2\.12 or newer"),
        ("2.12rc1", True, ""),
        ("2.14.1", True, ""),
        ("2.15.0", True, "note"),
        ("3.0.0", True, "note"),
    ],
)
def test_which_torch_is_accepted(
    capsys: pytest.CaptureFixture[str], torch: str, sharded_experts: bool, outcome: str
) -> None:
    found = {"python": "3.10.1", "packages": {"torch": torch}}
    if outcome in ("", "note"):
        check_torch(Path("/x/python"), found, PythonEnvironment(), neuron=False, sharded_experts=sharded_experts)
        printed = capsys.readouterr().out
        assert (f"torch {torch} is newer than 2.14" in printed) == bool(outcome)
        return
    with pytest.raises(UserError, match=outcome) as refused:
        check_torch(Path("/x/python"), found, PythonEnvironment(), neuron=False, sharded_experts=sharded_experts)
    assert ("parallelism.sharding" in str(refused.value)) == sharded_experts
