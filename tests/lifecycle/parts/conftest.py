"""A node that is a directory below tmp_path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from provision import identity
from provision.journal import Journal
from provision.node import Node
from provision.settings import read_settings

from tests.lifecycle.instances import CONTROLLER, SETTINGS, WORKERS, resource_config
from tests.lifecycle.nodes import LIFECYCLE


@pytest.fixture
def node(tmp_path: Path) -> Node:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(SETTINGS))
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    return Node(root, read_settings(file), Journal(root / "steps.jsonl"), LIFECYCLE)


@pytest.fixture
def config(node: Node) -> Path:
    file = node.path(identity.RESOURCE_CONFIG)
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(resource_config((CONTROLLER, WORKERS[0]))))
    return file


@pytest.fixture
def listed(node: Node, config: Path) -> Node:
    """A node below tmp_path that knows who it is, with an empty shared file system."""
    record = node.path(identity.RECORD)
    record.parent.mkdir(parents=True)
    found = identity.identify(CONTROLLER.instance_id, node.path, SETTINGS["groups"])
    record.write_text(identity.record(found))
    node.fsx.mkdir()
    return node
