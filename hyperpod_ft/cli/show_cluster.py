"""What `hyperpod-ft cluster` prints."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from hyperpod_ft.aws.findings import Finding
from hyperpod_ft.aws.hyperpod import api
from hyperpod_ft.aws.hyperpod.api import Cluster
from hyperpod_ft.aws.hyperpod.nodes import Node, tally
from hyperpod_ft.config.cluster_config import ClusterConfig
from hyperpod_ft.progress import format_bytes

if TYPE_CHECKING:  # what they import is for commands that ask AWS
    from hyperpod_ft.aws.stack.stack import Remaining
    from hyperpod_ft.aws.validation.validate import ValidationResult


def say(line: str) -> None:
    """A line of progress, with the time: creation takes a quarter of an hour and more."""
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


def tell(line: str) -> None:
    """A line beside the output of a remote command, which has standard output for itself."""
    print(line, file=sys.stderr, flush=True)


def problems(found: Sequence[str], as_json: bool) -> int:
    """Print what is wrong with the file itself; returns the exit code."""
    if as_json:
        print(json.dumps({"findings": [{"severity": "error", "problem": text} for text in found]}, indent=2))
    else:
        for text in found:
            print(f"error: {text}")
    return 1


def findings(found: Sequence[Finding], as_json: bool) -> int:
    """Print what was found in files written by hand; returns the exit code."""
    if as_json:
        print(json.dumps({"findings": [asdict(finding) for finding in found]}, indent=2))
    else:
        for finding in found:
            print(finding)
        print(_verdict(found))
    return 1 if any(finding.severity == "error" for finding in found) else 0


def validated(checked: "ValidationResult", as_json: bool) -> int:
    """Print what validation found and what it looked at; returns the exit code."""
    if as_json:
        print(json.dumps(asdict(checked), indent=2))
    else:
        for finding in checked.findings:
            print(finding)
        for skipped in checked.skipped:
            print(f"not checked: {skipped}")
        print(f"looked at: {', '.join(checked.done)}")
        where = f"account {checked.account}" if checked.account else "offline"
        print(f"{_verdict(checked.findings)} ({len(checked.done)} checks, {where}, {checked.seconds:.1f} s)")
    return 1 if checked.has_errors else 0


def _verdict(found: Sequence[Finding]) -> str:
    errors = sum(finding.severity == "error" for finding in found)
    return f"{_number(errors, 'error')}, {_number(len(found) - errors, 'warning')}"


def _number(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def status(cluster: Cluster, nodes: list[Node], as_json: bool) -> int:
    """Print a cluster and its groups; returns the exit code."""
    if as_json:
        told = {
            **asdict(cluster),
            "id": cluster.id,
            "complete": cluster.complete,
            "nodes": [asdict(node) for node in nodes],
        }
        print(json.dumps(told, indent=2))
    else:
        print(f"{cluster.name}  {cluster.status}  {cluster.arn}")
        if cluster.failure:
            print(f"failure: {cluster.failure}")
        table = _table("group", "role", "type", "instances", "nodes")
        for group in cluster.groups:
            members = [node for node in nodes if node.group == group.name]
            instances = f"{group.current} of {group.target}"
            table.add_row(group.name, group.node_type.lower(), group.instance_type, instances, tally(members))
        _console().print(table)
        for line in dict.fromkeys(
            f"{node.group} {node.instance_id}".strip() + f": {node.message}" for node in nodes if node.message
        ):
            print(line)
    failed = cluster.status == api.FAILED or any(node.failed for node in nodes)
    return 1 if failed else 0


def nodes(found: list[Node], as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(node) for node in found], indent=2))
        return
    table = _table("group", "instance", "host", "type", "state", "since")
    for node in found:
        since = datetime.fromtimestamp(node.launched, timezone.utc).strftime("%Y-%m-%d %H:%M") if node.launched else ""
        state = f"{node.status}: {node.message}" if node.message else node.status
        table.add_row(node.group, node.instance_id, node.hostname, node.instance_type, state, since)
    _console().print(table)


def remains(left: "Remaining", name: str, region: str) -> None:
    """Print what is left of a cluster and costs money."""
    lines = _costs(left)
    print(
        f"What is left in {region} and costs money:"
        if lines
        else f"Nothing of it is left in {region} that costs money."
    )
    for line in lines:
        print(f"  {line}")
    if lines:
        print("`hyperpod-ft cluster create` finds it again. Without the data nothing is left:")
        print(f"  hyperpod-ft cluster delete {name} --region {region} --delete-data")


def _costs(remains: "Remaining") -> list[str]:
    """What is still there and costs money, a line each."""
    lines = []
    if remains.filesystem:
        lines.append(f"file system {remains.filesystem.id}: {remains.filesystem.gib} GiB, billed by the hour")
    if remains.bucket:
        lines.append(
            f"bucket {remains.bucket.name}: {format_bytes(remains.bucket.bytes)} in {remains.bucket.objects} objects"
        )
    if remains.nat_gateway_id:
        lines.append(f"NAT gateway {remains.nat_gateway_id}, billed by the hour")
    if remains.elastic_ip:
        lines.append(f"address {remains.elastic_ip}, billed by the hour")
    return lines


def created(config: ClusterConfig, cluster: Cluster, file: Path) -> None:
    worker = config.workers[0]
    count = cluster.group(worker.name).target
    print(
        f"{cluster.name} is complete: {', '.join(f'{group.current} {group.instance_type}' for group in cluster.groups)}"
    )
    print(f"Reach it:    hyperpod-ft cluster ssh {file}")
    print(
        f"In run files: cluster.root: {config.fsx.mount_path}/<user>/hyperpod-ft, "
        f"instance_type: {worker.instance_type}, nodes: {count}, partition: {worker.partition}"
    )
    print(f"It costs money until: hyperpod-ft cluster delete {file}")


def _console() -> Console:
    # in a pipe rich assumes 80 columns and would fold ids that a script reads
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
