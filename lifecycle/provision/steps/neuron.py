"""Check that all Neuron devices of a Trainium node are present and that its driver answers."""

from __future__ import annotations

import json
import os
from typing import Any, Sequence

from provision.errors import NodeError, PassingError
from provision.node import Node
from provision.step import Step

# Neuron documentation, architecture pages of the instance types that HyperPod offers.
DEVICES = {"ml.trn1.32xlarge": 16, "ml.trn1n.32xlarge": 16, "ml.trn2.3xlarge": 1, "ml.trn2.48xlarge": 16}
# AWS announced in October 2026 that the second replaces the first with Neuron 2.34.
_JSON_OPTIONS = (("--json-output",), ("--output-format", "json"))


class Neuron(Step):
    name = "neuron"
    needs = ("identify",)

    def needed(self, node: Node) -> bool:
        return node.live and node.identity.role == "compute" and node.identity.instance_type in DEVICES

    def missing(self, node: Node) -> Sequence[str]:
        """Raises NodeError if a device is missing, PassingError if the driver does not answer."""
        kind = node.identity.instance_type
        found = count_devices(_listing(node))
        if found < DEVICES[kind]:
            raise NodeError(
                f"{node.identity.instance_id}: {found} of the {DEVICES[kind]} Neuron devices of {kind}",
                "replace the node, on the controller: "
                f"scontrol update node={os.uname().nodename} state=fail reason=Action:Replace",
            )
        return []

    def do(self, node: Node) -> None:
        """Nothing to do: `missing` either returns nothing or raises."""


def count_devices(listing: Any) -> int:
    """The number of devices in the JSON of `neuron-ls`: a list of devices, or an object with that list."""
    if isinstance(listing, dict):
        return max((count_devices(value) for value in listing.values() if isinstance(value, list)), default=0)
    return sum(isinstance(entry, dict) for entry in listing)


def _listing(node: Node) -> Any:
    for options in _JSON_OPTIONS:
        done = node.run("neuron-ls", *options, check=False)
        if done.returncode == 0:
            try:
                return json.loads(done.stdout)
            except ValueError:
                continue
    said = (done.stderr + done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
    raise PassingError(f"neuron-ls: {said[-1]}", "if this persists, replace the node")
