"""Rotate the logs of Slurm and of these scripts, so that they do not fill the root volume.

Slurm's only where no other file of /etc/logrotate.d does: on the API-driven path sagemaker-hyperpod-slurm may, and
logrotate takes a log that two files name as an error.

copytruncate would lose lines that are written between copying and truncating; Slurm's daemons reopen their logs on
SIGUSR2 (slurm.conf(5), LOGGING).
"""

from __future__ import annotations

from typing import Sequence

from provision.files import File, FilesStep
from provision.node import Node

_FOLDER = "/etc/logrotate.d"
_NAME = "hyperpod-ft"
_OURS = """\
# Written by the step logrotate of hyperpod-ft's lifecycle scripts.
/var/log/provision/*.log /var/log/provision/*.jsonl {
    size 50M
    rotate 4
    compress
    missingok
    notifempty
    copytruncate
}
"""
_SLURM = """
/var/log/slurm/*.log {
    size 50M
    rotate 4
    compress
    delaycompress
    missingok
    notifempty
    nocreate
    sharedscripts
    postrotate
        for daemon in slurmctld slurmd slurmdbd; do pkill -x --signal SIGUSR2 $daemon || true; done
    endscript
}
"""


class Logrotate(FilesStep):
    name = "logrotate"

    def files(self, node: Node) -> Sequence[File]:
        others = [file for file in node.path(_FOLDER).glob("*") if file.name != _NAME and file.is_file()]
        rotated = any("/var/log/slurm/" in file.read_text(errors="replace") for file in others)
        return [File(f"{_FOLDER}/{_NAME}", _OURS if rotated else _OURS + _SLURM)]
