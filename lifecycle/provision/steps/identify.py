"""Records the identity of this node in /var/lib/provision/node.json for all other steps."""

from __future__ import annotations

from typing import Sequence

from provision.files import File, FilesStep
from provision.identity import RECORD, ask_instance_id, identify, record
from provision.node import Node


class Identify(FilesStep):
    name = "identify"
    # HyperPod may add the instance to its list while this runs.
    attempts = 5
    deadline = 300.0

    def files(self, node: Node) -> Sequence[File]:
        return [File(RECORD, record(identify(ask_instance_id(), node.path, node.settings.groups)))]
