"""Start Slurm's daemons, each on its nodes (legacy path; on the API-driven path HyperPod does).

slurmctld on controllers, slurmd elsewhere, with its configuration from the controllers (`--conf-server`). slurmd is
masked on a controller and never touched there: its unit deletes slurm.conf before it starts.

slurmd's options are in a drop-in. AWS's sample runs envsubst on the unit instead, which also empties `$MAINPID`, works
only once, and is lost with the next unit file.
"""

from __future__ import annotations

import time
from typing import Sequence

from provision import slurm_conf, slurm_state, systemd
from provision.errors import NodeError, PassingError
from provision.files import File, difference, read, write
from provision.node import Node
from provision.step import Step

_OPTIONS = "/etc/default/hyperpod-ft-slurmd"
_DROP_IN = "/etc/systemd/system/slurmd.service.d/60-hyperpod-ft.conf"
# RequiresMountsFor: a node without its file system would accept every job and fail it; ordering alone does not prevent
# slurmd from starting. The last EnvironmentFile overrides the unit's own and any Environment=. StartLimitIntervalSec:
# starts fail until a controller answers, also after a reboot of the whole cluster, so they are never limited.
_DROP_IN_TEXT = f"""\
{slurm_conf.MARK}
[Unit]
RequiresMountsFor={{mount_path}}
StartLimitIntervalSec=0

[Service]
EnvironmentFile={_OPTIONS}
Restart=on-failure
RestartSec=3
"""
# The controller may need to set up a database first.
_SECONDS = 900.0


class SlurmDaemons(Step):
    name = "slurm_daemons"
    # A node accepts jobs only once everything that they rely on is in place.
    needs = ("limits", "neuron", "fsx", "users", "home", "epilog", "slurm_configuration", "accounting")
    deadline = 1000.0

    def needed(self, node: Node) -> bool:
        return node.live and node.settings.provisioning == "legacy"

    def missing(self, node: Node) -> Sequence[str]:
        return _slurmctld_missing(node) if node.identity.role == "controller" else _slurmd_missing(node)

    def do(self, node: Node) -> None:
        controller = node.identity.role == "controller"
        renewed = _start_slurmctld(node) if controller else _start_slurmd(node)
        end = time.monotonic() + _SECONDS
        while found := self.missing(node):
            if time.monotonic() >= end:
                unit = "slurmctld" if controller else "slurmd"
                message = systemd.journal(node, unit)
                raise NodeError(
                    f"after {_SECONDS:.0f} s: {'; '.join(found)}{f' ({unit}: {message})' if message else ''}",
                    f"see /var/log/slurm/{unit}.log",
                )
            time.sleep(0.5)
        if renewed:
            # Every slurmd fetches the new configuration.
            slurm_state.reconfigure(node)


def _slurmctld_missing(node: Node) -> list[str]:
    found = [*systemd.not_masked(node, "slurmd"), *systemd.not_kept_running(node, "slurmctld")]
    return found or _not_in_effect(node) or slurm_state.unreachable(node)


def _not_in_effect(node: Node) -> list[str]:
    """Settings that slurmctld does not use because they were written after it started."""
    running = slurm_state.running_configuration(node)
    conf = slurm_conf.with_included(read(node, slurm_conf.SLURM_CONF), read(node, slurm_conf.INCLUDED_CONF))
    wanted = {key: slurm_conf.value(conf, key) for key in ("Epilog", "AccountingStorageType")}
    found = [
        f"slurmctld runs without {key}={text}"
        for key, text in wanted.items()
        if text and running.get(key, text) != text
    ]
    if running.get("TopologyPlugin") == "topology/tree" and not slurm_state.has_switches(node):
        found.append("slurmctld runs without switches")
    return found


def _start_slurmctld(node: Node) -> bool:
    """Start slurmctld. Returns whether it was running and was restarted with a new configuration."""
    if systemd.not_masked(node, "slurmd"):
        systemd.mask(node, "slurmd")
    systemd.keep_running(node, "slurmctld")
    if not _not_in_effect(node):
        return False
    # Jobs continue while slurmctld restarts; some settings cannot be changed without a restart.
    node.run("systemctl", "restart", "slurmctld")
    return True


def _files(node: Node) -> list[File]:
    if not node.identity.controllers:
        raise PassingError(
            "resource_config.json names no controller yet", "check that its group is in the cluster file"
        )
    return [
        File(_OPTIONS, f'{slurm_conf.MARK}\nSLURMD_OPTIONS="{" ".join(_options(node))}"\n'),
        File(_DROP_IN, _DROP_IN_TEXT.format(mount_path=node.settings.fsx.mount_path)),
    ]


def _options(node: Node) -> tuple[str, str]:
    return "--conf-server", ",".join(node.identity.controllers)


def _has_other_options(node: Node) -> bool:
    """Whether slurmd is running with other options than the current ones."""
    command = systemd.main_process(node, "slurmd")
    option, controllers = _options(node)
    return bool(command) and not (option in command and controllers in command)


def _slurmd_missing(node: Node) -> list[str]:
    found = [
        *systemd.not_kept_running(node, "slurmd"),
        *(line for file in _files(node) for line in difference(node, file)),
        *systemd.stale(node, "slurmd"),
        *systemd.not_masked(node, "slurmctld"),
    ]
    if _has_other_options(node):
        found.append(f"slurmd runs without {' '.join(_options(node))}")
    if unreachable := slurm_state.unreachable(node):
        return [*found, *unreachable]
    if node.identity.address not in slurm_state.ask_nodes(node):
        # If slurm.conf lacks the node, slurmd exits and systemd restarts it until it is added. HyperPod's agent may add
        # a new node only after these scripts have succeeded, and never adds login nodes.
        return [line for line in found if not line.endswith("is not running")]
    return found


def _start_slurmd(node: Node) -> bool:
    """Start slurmd. Returns False: nothing has to reread its configuration."""
    for file in _files(node):
        write(node, file)
    if systemd.not_masked(node, "slurmctld"):
        systemd.mask(node, "slurmctld")
    if systemd.show(node, "slurmd", "LoadState") != "loaded":
        raise NodeError("no slurmd.service on this node", "use HyperPod's AMI for Slurm")
    systemd.keep_running(node, "slurmd")
    if _has_other_options(node):
        # Tasks continue without slurmd: the unit kills only its own process.
        node.run("systemctl", "restart", "slurmd")
    return False
