"""A copy of these scripts at /opt/hyperpod-ft/lifecycle, for running a step by hand: /tmp is lost at a reboot."""

from __future__ import annotations

from typing import Sequence

from provision.files import File, FilesStep
from provision.node import Node

FOLDER = "/opt/hyperpod-ft/lifecycle"


class KeepScripts(FilesStep):
    name = "keep_scripts"

    def needed(self, node: Node) -> bool:
        return node.scripts != node.path(FOLDER)

    def missing(self, node: Node) -> Sequence[str]:
        different = super().missing(node)
        return [f"{len(different)} files of {FOLDER} differ from these scripts"] if different else []

    def files(self, node: Node) -> Sequence[File]:
        return [
            File(
                f"{FOLDER}/{path.relative_to(node.scripts)}", path.read_text(), 0o755 if path.suffix == ".sh" else 0o644
            )
            for path in sorted(node.scripts.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        ]
