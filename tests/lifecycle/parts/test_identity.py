"""A node finds out which instance it is, by files of HyperPod and by instance metadata."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from provision import identity
from provision.errors import NodeError, PassingError
from provision.node import Node

from tests.lifecycle.instances import CONTROLLER, SETTINGS, WORKERS, resource_config


def test_an_instance_is_found_by_id_before_address(node: Node, config: Path) -> None:
    # The address of a node that was replaced may still be listed for the old one.
    config.write_text(json.dumps(resource_config([replace(CONTROLLER, address="127.0.0.1"), WORKERS[0]])))
    found = identity.identify(WORKERS[0].instance_id, node.path, SETTINGS["groups"])
    assert (found.group, found.role, found.address) == ("worker-group-1", "compute", WORKERS[0].address)
    assert found.instance_type == "ml.trn1.32xlarge"
    assert found.controllers == ("127.0.0.1",)
    by_address = identity.identify("i-0123", node.path, SETTINGS["groups"])
    assert (by_address.role, by_address.instance_id) == ("controller", "i-0123")
    without_metadata = identity.identify("", node.path, SETTINGS["groups"])
    assert (without_metadata.role, without_metadata.instance_id) == ("controller", CONTROLLER.instance_id)


def test_an_instance_that_is_not_listed_yet_may_be_soon(node: Node, config: Path) -> None:
    config.write_text(
        json.dumps(
            resource_config([replace(CONTROLLER, address="203.0.113.1"), replace(WORKERS[0], address="203.0.113.2")])
        )
    )
    with pytest.raises(PassingError, match="neither i-0123 nor any address of this machine"):
        identity.identify("i-0123", node.path, SETTINGS["groups"])
    config.write_text('{"InstanceGr')
    with pytest.raises(PassingError, match="resource_config"):
        identity.identify("i-0123", node.path, SETTINGS["groups"])


@pytest.mark.parametrize("address", [None, ""])
def test_an_instance_without_an_address_is_not_there_yet(node: Node, config: Path, address: str | None) -> None:
    resources = resource_config((CONTROLLER, WORKERS[0]))
    starting = {"InstanceName": "controller-machine-2", "InstanceId": "i-0fff", "CustomerIpAddress": address}
    resources["InstanceGroups"][0]["Instances"] += [starting, {"InstanceName": "controller-machine-3"}]
    config.write_text(json.dumps(resources))
    assert identity.identify(WORKERS[0].instance_id, node.path, SETTINGS["groups"]).controllers == (CONTROLLER.address,)


def test_hyperpods_own_file_gives_roles_that_the_settings_do_not(node: Node, config: Path) -> None:
    with pytest.raises(NodeError, match="'worker-group-1' has no role"):
        identity.identify(WORKERS[0].instance_id, node.path, {})
    parameters = {
        "controller_group": "controller-machine",
        "worker_groups": [{"instance_group_name": "worker-group-1", "partition_name": "dev"}],
    }
    node.path(identity.PROVISIONING_PARAMETERS).write_text(json.dumps(parameters))
    assert identity.identify(WORKERS[0].instance_id, node.path, {}).role == "compute"
    given = identity.identify(WORKERS[0].instance_id, node.path, {"worker-group-1": "login"})
    assert given.role == "login"


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, str]]]:
    """An instance metadata service, which gives these answers (status, text) before the right one."""
    wrong: list[tuple[int, str]] = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self._say(200, "secret")

        def do_GET(self) -> None:
            if self.headers.get("X-aws-ec2-metadata-token") != "secret":
                self._say(401, "")
            elif wrong:
                self._say(*wrong.pop())
            else:
                self._say(200, {"instance-id": "i-0123"}[self.path.split("/")[-1]])

        def _say(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PROVISION_IMDS", f"http://127.0.0.1:{server.server_port}")
    # A proxy, which the link-local address must not be asked through.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    yield wrong
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("answer", [(503, ""), (403, "no"), (200, "<html>a portal</html>"), (200, "")])
def test_instance_metadata_is_asked_with_a_token_until_it_answers(
    metadata: list[tuple[int, str]], answer: tuple[int, str]
) -> None:
    metadata.append(answer)
    assert identity.ask_instance_id(seconds=10) == "i-0123"
    metadata.append(answer)
    assert identity.ask_instance_id(seconds=0) == ""
