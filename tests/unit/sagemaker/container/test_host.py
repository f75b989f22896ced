"""What a container knows from SageMaker's files, and the link that stands for cluster.root."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.errors import UserError
from hyperpod_ft.sagemaker.container.host import ContainerHost, link_root, write_failure_reason

TOLD = {
    "job": "quick-train-1",
    "group": "train",
    "stages": "train",
    "root": "/fsx",
    "run_directory": "/fsx/run",
    "max_runtime": "600",
    "sagemaker_region": "us-west-2",  # of another tool
}


def written(ml: Path, current: str = "algo-1", **resources: Any) -> Path:
    directory = ml / "input/config"
    directory.mkdir(parents=True)
    config = {"current_host": current, "hosts": ["algo-1", "algo-10", "algo-2"], "network_interface_name": "eth0"}
    (directory / "resourceconfig.json").write_text(json.dumps(config | resources))
    (directory / "hyperparameters.json").write_text(json.dumps(TOLD))
    return ml


def test_hosts_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """SageMaker sorts them as text."""
    host = ContainerHost.read(written(tmp_path, "algo-10"))
    assert host.hosts == ("algo-1", "algo-2", "algo-10")
    assert (host.number, host.is_first, host.interface) == (2, False, "eth0")
    assert host.parameters.job == "quick-train-1" and host.run_directory == Path("/fsx/run")


def test_what_is_missing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"resourceconfig\.json"):
        ContainerHost.read(tmp_path)
    (written(tmp_path) / "input/config/hyperparameters.json").write_text('{"job": "quick-train-1"}')
    with pytest.raises(UserError, match=r"hyperparameters: .*'stages'.*hyperpod-ft"):
        ContainerHost.read(tmp_path)
    with pytest.raises(UserError, match=r"resourceconfig\.json: not as expected"):
        ContainerHost.read(written(tmp_path / "other", "algo-3"))


def test_a_host_without_an_address_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = ContainerHost.read(written(tmp_path))
    asked: list[str] = []

    def unknown_at_first(host: str, _: None) -> None:
        asked.append(host)
        if asked.count("algo-2") == 1 and host == "algo-2":
            raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown_at_first)
    host.wait_for_names()
    assert asked == ["algo-1", "algo-2", "algo-2", "algo-10"]
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, _: unknown_at_first("algo-2", asked.clear()))
    monkeypatch.setattr("hyperpod_ft.sagemaker.container.host._NAME_SECONDS", 0.0)
    with pytest.raises(UserError, match=r"algo-1: .*0 s"):
        host.wait_for_names()


def test_the_root_is_a_link_to_the_channel(tmp_path: Path) -> None:
    root, channel = tmp_path / "fsx" / "ft", tmp_path / "channel"
    channel.mkdir()
    root.mkdir(parents=True)  # an image may have it
    link_root(root, channel)
    link_root(root, channel)
    assert root.resolve() == channel
    (tmp_path / "full" / "file").mkdir(parents=True)
    with pytest.raises(UserError, match=r"cluster\.root.*full"):
        link_root(tmp_path / "full", channel)
    with pytest.raises(UserError, match=r"cluster\.root.*is a link to"):
        link_root(root, tmp_path / "another")


def test_the_root_may_be_the_directory_itself(tmp_path: Path) -> None:
    """Of a store: /tmp/hyperpod-ft is a natural place for the small files on the machine that submits, too."""
    root = tmp_path / "hyperpod-ft"
    for _ in range(2):
        link_root(root, root)
        assert root.is_dir() and not root.is_symlink()
    with pytest.raises(UserError, match="is below"):
        link_root(root / "runs", root)


def test_the_first_reason_is_the_jobs(tmp_path: Path) -> None:
    write_failure_reason("dataset.source: no such file" + "." * 2000, tmp_path)
    write_failure_reason("another", tmp_path)
    text = (tmp_path / "output/failure").read_text()
    assert text.startswith("dataset.source: no such file") and len(text) == 1024
