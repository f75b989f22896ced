"""Check that all Neuron devices of a Trainium node are present and that its driver answers."""

from __future__ import annotations

import json
import os
import re
from typing import Any, Sequence

from provision.errors import NodeError, PassingError
from provision.node import Node
from provision.step import Step

# Neuron documentation, architecture pages of the instance types that HyperPod offers.
DEVICES = {"ml.trn1.32xlarge": 16, "ml.trn1n.32xlarge": 16, "ml.trn2.3xlarge": 1, "ml.trn2.48xlarge": 16}
# AWS announced in October 2026 that the second replaces the first with Neuron 2.34. Without options, the program
# answers people, which shows that the driver works.
_OPTIONS = (("--json-output",), ("--output-format", "json"), ())


class Neuron(Step):
    name = "neuron"
    needs = ("identify",)

    def needed(self, node: Node) -> bool:
        return node.live and node.identity.role == "compute" and node.identity.instance_type in DEVICES

    def missing(self, node: Node) -> Sequence[str]:
        """Raises NodeError if a device is missing, PassingError if the driver does not answer."""
        kind = node.identity.instance_type
        found = _listed(node)
        if found is None:
            found = sum(bool(re.fullmatch(r"neuron\d+", path.name)) for path in node.path("/dev").iterdir())
            node.say("neuron-ls answers in a format that the kit does not know; the devices are counted in /dev")
        if found < DEVICES[kind]:
            raise NodeError(
                f"{node.identity.instance_id}: {found} of the {DEVICES[kind]} Neuron devices of {kind}",
                "replace the node, on the controller: "
                f"scontrol update node={os.uname().nodename} state=fail reason=Action:Replace",
            )
        return []

    def do(self, node: Node) -> None:
        """Nothing to do: `missing` either returns nothing or raises."""


def _count(listing: Any) -> int | None:
    """The number of devices in the JSON of `neuron-ls`: a list of devices, or an object with that list; else None."""
    if isinstance(listing, dict):
        lists = [value for value in listing.values() if isinstance(value, list)]
        listing = lists[0] if len(lists) == 1 else None
    if isinstance(listing, list) and all(isinstance(entry, dict) and "neuron_device" in entry for entry in listing):
        return len(listing)
    return None


def _listed(node: Node) -> int | None:
    """The number of devices that `neuron-ls` lists; None when its answers have no format that is known here."""
    answers = False
    for options in _OPTIONS:
        done = node.run("neuron-ls", *options, check=False)
        if done.returncode == 0:
            answers = True
            try:
                found = _count(json.loads(done.stdout))
            except ValueError:
                continue
            if found is not None:
                return found
    if answers:
        return None
    said = (done.stderr + done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
    raise PassingError(f"neuron-ls: {said[-1]}", "if this persists, replace the node")
