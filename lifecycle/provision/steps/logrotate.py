"""Rotate the logs of Slurm and of these scripts, so that they do not fill the root volume.

copytruncate would lose lines that are written between copying and truncating; Slurm's daemons reopen their logs on
SIGUSR2 (slurm.conf(5), LOGGING).
"""

from __future__ import annotations

from typing import Sequence

from provision.files import File, FilesStep
from provision.node import Node

_CONFIGURATION = """\
# Written by the step logrotate of hyperpod-ft's lifecycle scripts.
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

/var/log/provision/*.log /var/log/provision/*.jsonl {
    size 50M
    rotate 4
    compress
    missingok
    notifempty
    copytruncate
}
"""


class Logrotate(FilesStep):
    name = "logrotate"

    def files(self, node: Node) -> Sequence[File]:
        return [File("/etc/logrotate.d/hyperpod-ft", _CONFIGURATION)]
