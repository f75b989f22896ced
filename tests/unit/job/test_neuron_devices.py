"""The devices that neuron-ls lists, which stands in for AWS's program, and what stage env says of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hyperpod_ft.config.instances import CATALOGUE
from hyperpod_ft.errors import UserError
from hyperpod_ft.job import node_report
from hyperpod_ft.job.health import doubts, problems
from hyperpod_ft.job.node_report import neuron_devices
from hyperpod_ft.stages import env
from hyperpod_ft.stages.env import _neuron_devices
from tests.programs import write_program

DEVICE = {"neuron_device": 0, "nc_count": 2, "memory_size": 34359738368, "neuron_processes": [{"command": "secret"}]}
TRN1 = CATALOGUE["trn1.32xlarge"]
KNOWN = {key: value for key, value in DEVICE.items() if key != "neuron_processes"}


def program(directory: Path, text: str) -> Path:
    """A `neuron-ls`."""
    write_program(directory / "neuron-ls", text)
    return directory / "neuron-ls"


@pytest.mark.parametrize(
    ("option", "listing"),
    [("--json-output", [DEVICE, DEVICE]), ("--output-format json", {"instance": "x", "devices": [DEVICE, DEVICE]})],
    ids=["until 2.33", "from 2.34"],
)
def test_devices_are_read_in_both_formats(tmp_path: Path, option: str, listing: object) -> None:
    (tmp_path / "listing").write_text(json.dumps(listing))
    stand_in = program(tmp_path, f'[[ "$*" == "{option}" ]] && cat {tmp_path}/listing')
    assert neuron_devices(stand_in) == [KNOWN, KNOWN]


def test_a_driver_that_does_not_serve_its_devices_is_an_error(tmp_path: Path) -> None:
    stand_in = program(tmp_path, "echo 'error=driver version is not supported' >&2; exit 1")
    assert neuron_devices(stand_in, tmp_path) == [], "a node without devices"
    (tmp_path / "neuron0").touch()
    with pytest.raises(UserError, match=r"neuron-ls: error=driver version is not supported; the node's Neuron driver"):
        neuron_devices(stand_in, tmp_path)


@pytest.mark.parametrize("listing", ['{"nodes": [{"devices": 16}]}', "16 devices", "[16]", "16", '{"a": [], "b": []}'])
def test_an_unknown_format_is_doubted_and_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], listing: str
) -> None:
    (tmp_path / "neuron0").touch()
    assert neuron_devices(program(tmp_path, f"echo '{listing}'"), tmp_path) is None
    assert neuron_devices(program(tmp_path, f"[[ $# == 0 ]] && echo '{listing}'"), tmp_path) is None
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(node_report, "neuron_devices", lambda _: None)
    monkeypatch.setattr(env, "neuron_devices", lambda _: None)
    assert _neuron_devices() is None
    assert "answers in a format that the kit does not know" in capsys.readouterr().out
    report = replace(node_report.observe(TRN1, 1, tmp_path), device_files=16)
    assert problems([report], TRN1, str) == []
    (doubt,) = doubts([report], TRN1)
    assert doubt.startswith(f"{report.node}: {tmp_path}/neuron-ls answers in a format that the kit does not know")
    assert problems([replace(report, device_files=15)], TRN1, str) != []


def test_a_node_without_neuron_ls_is_said_and_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(node_report, "_NEURON_TOOLS", str(tmp_path))
    assert _neuron_devices() is None
    assert "env: no neuron-ls on " in capsys.readouterr().out
    program(tmp_path, f"echo '{json.dumps([DEVICE])}'")
    assert _neuron_devices() == [KNOWN]
    assert "sees 1 Neuron devices" in capsys.readouterr().out
