"""Read this node's Neuron devices with `neuron-ls`."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hyperpod_ft.errors import UserError, last_line

_TOOLS = "/opt/aws/neuron/bin"
# The second replaces the first in Neuron 2.34 (AWS's announcement of October 2026).
_JSON_OPTIONS = (("--json-output",), ("--output-format", "json"))
_SECONDS = 120


def neuron_ls() -> Path | None:
    """The path of the program, which is part of AWS's images; None elsewhere."""
    found = shutil.which("neuron-ls") or shutil.which("neuron-ls", path=_TOOLS)
    return Path(found) if found else None


def devices(program: Path, device_files: Path = Path("/dev")) -> list[dict[str, Any]]:
    """The node's devices, without the processes that use them; empty on a node without device files.

    Raises UserError when `neuron-ls` cannot read the devices: the driver is missing, or its version does not match.
    """
    messages: list[str] = []
    for options in _JSON_OPTIONS:
        try:
            done = subprocess.run(
                [str(program), *options], capture_output=True, text=True, check=False, timeout=_SECONDS
            )
            if done.returncode == 0:
                return _described(json.loads(done.stdout))
            messages.append(last_line(done.stderr + done.stdout) or f"exit status {done.returncode}")
        except (ValueError, AttributeError, TypeError) as error:
            messages.append(f"unexpected JSON: {error}")
        except subprocess.TimeoutExpired:
            messages.append(f"did not finish within {_SECONDS} s")
    if not any(device_files.glob("neuron[0-9]*")):
        return []
    raise UserError(
        f"{program}: {', then '.join(dict.fromkeys(messages))}",
        "the node's Neuron driver is not running or does not match its tools: have the cluster's image updated or the"
        " node replaced; the kit does not change drivers",
    )


def _described(listing: Any) -> list[dict[str, Any]]:
    if isinstance(listing, dict):  # the newer format has the list in an object
        (listing,) = (value for value in listing.values() if isinstance(value, list))
    return [{key: value for key, value in entry.items() if key != "neuron_processes"} for entry in listing]
