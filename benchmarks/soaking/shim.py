"""Make the files of a run's processes fail and their clocks jump, while they run: the control of shim.c."""

import mmap
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

OPERATIONS = ("open", "read", "write", "sync", "rename")  # in the order of shim.c
NODES = ("head", "node1", "node2", "node3", "node4")
_LAYOUT = struct.Struct(f"=iIII{len(NODES)}q{len(OPERATIONS)}Q256s256s")
_FAILING = struct.Struct("=iII")
_CLOCKS = struct.Struct("=q")
_CLOCKS_AT = 16
_FAILED = struct.Struct(f"={len(OPERATIONS)}Q")
_FAILED_AT = _CLOCKS_AT + 8 * len(NODES)


def build(directory: Path) -> Path:
    """Compile the library with gcc; returns its path."""
    library = directory / "shim.so"
    source = Path(__file__).with_name("shim.c")
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-O2",
        "-Wall",
        "-Werror",
        "-o",
        str(library),
        str(source),
        "-ldl",
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    return library


class Shim:
    """What the processes with `environment` see, below `root` without `spared`."""

    def __init__(self, library: Path, control: Path, root: Path, spared: Path) -> None:
        control.write_bytes(
            _LAYOUT.pack(*([0] * (4 + len(NODES) + len(OPERATIONS))), bytes(root), bytes(spared)).ljust(4096, b"\0")
        )
        with control.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 4096)
        self.environment = {"LD_PRELOAD": str(library), "SOAK_CONTROL": str(control)}

    def fail(self, error: int, per_million: int, operations: Sequence[str]) -> None:
        """Have these operations fail with that errno, as often as that; errno 0: none."""
        kinds = sum(1 << OPERATIONS.index(operation) for operation in operations)
        _FAILING.pack_into(self._memory, 0, error, per_million, kinds)

    def failed(self) -> dict[str, int]:
        """How many operations have failed since the start, by kind."""
        return dict(zip(OPERATIONS, _FAILED.unpack_from(self._memory, _FAILED_AT), strict=True))

    def set_clock(self, node: str, seconds: float) -> None:
        """Set the clock of a node's processes (`head`: the user's commands) ahead of the machine's."""
        _CLOCKS.pack_into(self._memory, _CLOCKS_AT + 8 * NODES.index(node), round(seconds * 1e9))
