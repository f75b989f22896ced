"""One digest of all tensors in a model directory, read in blocks."""

import hashlib
import json
from pathlib import Path

_BLOCK_BYTES = 8 << 20


def digest(directory: Path) -> str:
    """SHA-256 over all tensors by name: dtype, shape and bytes, whatever files they are in."""
    digests = {}
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            entries = json.loads(stream.read(size))
            entries.pop("__metadata__", None)
            for name, entry in entries.items():
                begin, end = entry["data_offsets"]
                stream.seek(8 + size + begin)
                content = hashlib.sha256(f"{entry['dtype']} {entry['shape']} ".encode())
                left = end - begin
                while left:
                    block = stream.read(min(left, _BLOCK_BYTES))
                    if not block:
                        raise ValueError(f"{file}: ends within {name}")
                    content.update(block)
                    left -= len(block)
                digests[name] = content.hexdigest()
    text = json.dumps(sorted(digests.items()))
    return hashlib.sha256(text.encode()).hexdigest()
