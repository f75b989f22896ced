"""A controller of its own for each test, where nodes can be made of namespaces; elsewhere the tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lifecycle.nodes import LIGHT, Node, why_not_here
from tests.lifecycle.provisioned.provisioned_nodes import nodes


@pytest.fixture(autouse=True, scope="session")
def _nodes_possible() -> None:
    if reason := why_not_here(LIGHT):
        pytest.skip(reason)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A controller, where HyperPod has mounted the file system."""
    with nodes(tmp_path, workers=0) as (only,):
        yield only


@pytest.fixture
def legacy_node(tmp_path: Path) -> Iterator[Node]:
    """A controller, where these scripts mount it."""
    with nodes(tmp_path, workers=0, provisioning="legacy") as (only,):
        yield only
