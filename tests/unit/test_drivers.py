"""Drivers that are too old, found without importing torch. There is no accelerator here."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from hyperpod_ft import drivers
from hyperpod_ft.sagemaker.container import drivers as container_drivers
from hyperpod_ft.shipped import PACKAGE


@pytest.fixture
def neuron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the Neuron driver's version."""
    monkeypatch.setattr(drivers, "_NEURON", tmp_path / "version")
    return tmp_path / "version"


def test_an_older_neuron_driver_is_doubted(neuron: Path) -> None:
    assert drivers.neuron_doubt("2.24.7.0") is None, "no driver: the health check counts devices"
    for version, old in (("2.19.64.0", True), ("2.9.1", True), ("2.24.7.0", False), ("2.31.7.0", False)):
        neuron.write_text(f"{version}\n")
        assert (drivers.neuron_doubt("2.24.7.0") is not None) == old, version


def test_the_cuda_version_of_torch_is_read_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert drivers.cuda_of_torch() == (torch.version.cuda or "")
    monkeypatch.setattr(drivers.importlib.util, "find_spec", lambda _: ModuleSpec("torch", None, origin=str(tmp_path)))
    assert drivers.cuda_of_torch() == ""
    monkeypatch.setattr(drivers.importlib.util, "find_spec", lambda _: None)
    assert drivers.cuda_of_torch() == ""


@pytest.mark.parametrize(
    ("needed", "offered", "fits"),
    [
        ("13.0", (12, 8), False),
        ("13.3", (13, 0), True),  # minor versions are compatible
        ("12.8", (13, 0), True),
        ("13.0", None, True),  # no driver: nvidia-smi lists no GPU
        ("", (12, 4), True),
    ],
)
def test_a_driver_for_an_earlier_cuda_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, needed: str, offered: tuple[int, int] | None, fits: bool
) -> None:
    monkeypatch.setattr(drivers, "cuda_of_torch", lambda: needed)
    monkeypatch.setattr(drivers, "cuda_of_driver", lambda: offered)
    fault = drivers.cuda_fault()
    assert (fault is None) == fits
    assert fits or "torch is built for CUDA 13.0, and the NVIDIA driver supports CUDA 12.8; have" in str(fault)


def test_a_container_says_it_before_it_pulls_anything(
    neuron: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pins = "hyperpod_ft/pins/neuron-2.26.1.txt"
    container_drivers.look(Path(sys.executable), pins, str(PACKAGE.parent))
    assert capfd.readouterr() == ("", ""), "no accelerator"
    neuron.write_text("2.19.64.0")
    monkeypatch.setattr(drivers, "cuda_fault", lambda: "torch is built for CUDA 13.0")
    monkeypatch.setattr(sys, "argv", ["drivers", pins])
    container_drivers.main()
    doubt, fault = capfd.readouterr().out.splitlines()
    assert doubt.startswith("warning: Neuron driver 2.19.64.0 is older than 2.24.7.0, which AWS released with this SDK")
    assert fault == "warning: torch is built for CUDA 13.0"
