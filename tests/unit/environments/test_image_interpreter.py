"""The interpreter of the stages: the image's own, or an environment on top of it with what it lacks."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from hyperpod_ft.environments import image_interpreter as interpreter
from hyperpod_ft.errors import UserError

PINS = """
# comment
torch==2.13.0
nvidia-cublas==13.1.1.3 ; sys_platform == 'linux'
triton==3.5.0
optimum-neuron[training]==0.4.5
transformers==5.20.2
numpy==2.2.6 ; python_full_version < '3.11'
"""


def test_only_what_the_image_lacks_is_installed() -> None:
    image = {"torch": "2.13.0", "transformers": "4.57.6", "numpy": "2.2.6"}
    assert interpreter.to_install(PINS.splitlines(), image.get) == [
        "optimum-neuron[training]==0.4.5",
        "transformers==5.20.2",
    ]


def test_another_torch_comes_with_its_cuda_libraries() -> None:
    image = {"torch": "2.9.0", "transformers": "5.20.2", "numpy": "2.2.6", "optimum-neuron": "0.4.5"}
    assert interpreter.to_install(PINS.splitlines(), image.get) == [
        "torch==2.13.0",
        "nvidia-cublas==13.1.1.3 ; sys_platform == 'linux'",
        "triton==3.5.0",
    ]


@pytest.mark.parametrize(
    ("version", "lacking"),
    [("2.13.3.0.20482", False), ("2.13.3.0", False), ("2.13.3.1.5", True), ("2.13.3.01.5", True), (None, True)],
)
def test_a_pin_may_leave_the_build_open(version: str | None, lacking: bool) -> None:
    pin = "torch-neuronx==2.13.3.0.*"
    assert interpreter.to_install([pin], lambda _: version) == [pin] * lacking


@pytest.mark.parametrize("line", ["torch>=2.13.0", "torch", "--extra-index-url https://pip.repos.neuron.amazonaws.com"])
def test_what_is_no_pin_is_named(line: str) -> None:
    with pytest.raises(ValueError, match=f"{line}' is not name==version"):
        interpreter.to_install([line], lambda _: None)


def test_dependencies_come_with_the_pins_or_from_pip() -> None:
    directory = Path(interpreter.__file__).parents[1] / "pins"
    for name, without in (("torch", ["--no-deps"]), ("neuron-2.26.1", []), ("torch-neuron", [])):
        lines = (directory / f"{name}.txt").read_text().splitlines()
        assert interpreter.options(lines) == without
        assert len(interpreter.to_install(lines, lambda _: None)) > 5, "every line is understood"


def test_every_environment_gets_the_packages_for_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their dependencies are all named, so that hosts that install at different times have the same versions."""
    ran: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: ran.append(command))
    monkeypatch.setattr(interpreter, "_installed", lambda _: None)
    for name in ("torch", "neuron-2.26.1"):
        interpreter.install(Path("/python"), Path(interpreter.__file__).parents[1] / "pins" / f"{name}.txt")
        assert "--no-deps" in ran[-1]
        assert {"awscrt", "boto3"} <= {argument.partition("==")[0] for argument in ran[-1]}


def test_an_image_with_torch_neuron_keeps_all_that_belongs_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS's image has a newer torch than the pins; pip would take another build from the usual index."""
    ran: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: ran.append(command))
    monkeypatch.setattr(interpreter, "_installed", {"torch-neuronx": "2.14.3.0", "torch": "2.14.0"}.get)
    interpreter.install(Path("/python"), Path(interpreter.__file__).parents[1] / "pins" / "torch-neuron.txt")
    installed = {argument.partition("==")[0] for argument in ran[0] if "==" in argument}
    assert {"transformers", "peft"} <= installed
    assert installed.isdisjoint({"torch", "torch-neuronx", "neuronx-cc", "nki"})


def test_an_image_for_neuron_must_have_torch_neuronx(tmp_path: Path) -> None:
    """PyPI has other packages of its names."""
    code = Path(interpreter.__file__).parents[2]
    for pins in ("torch-neuron", "neuron-2.28.0"):
        with pytest.raises(UserError, match=r"with ensurepip and torch-neuronx in this image; .*env\.container"):
            interpreter.prepare(tmp_path / "python", f"hyperpod_ft/pins/{pins}.txt", code)


def test_the_pins_for_aws_are_the_tested_packages() -> None:
    """boto3[crt], with the version of awscrt that this botocore takes."""
    file = Path(interpreter.__file__).parents[1] / "pins" / "aws.txt"
    pinned = dict(line.split("==") for line in file.read_text().splitlines() if "==" in line)
    assert pinned == {name: metadata.version(name) for name in pinned}
    needed = metadata.requires("botocore") or []
    assert any(pinned["awscrt"] in need for need in needed if need.startswith("awscrt"))


def test_an_interpreter_of_the_image_is_used_as_it_is(tmp_path: Path) -> None:
    interpreter.prepare(Path(sys.executable), "", tmp_path)
    with pytest.raises(UserError, match=r"env\.python: no .*sagemaker\.image"):
        interpreter.prepare(tmp_path / "python", "", tmp_path)


def test_the_environment_has_the_packages_under_it(tmp_path: Path) -> None:
    """Of a virtual environment: `--system-site-packages` would give those of its own base."""
    python = tmp_path / "python" / "bin" / "python"
    interpreter.create(python)
    program = "import pydantic, sys; print(sys.prefix)"
    done = subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "python")
