"""The output of `hyperpod-ft cluster`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from hyperpod_ft.cli.output import tables
from hyperpod_ft.progress import format_bytes

if TYPE_CHECKING:  # --help and the other commands start without them
    from hyperpod_ft.cluster.config import ClusterConfig
    from hyperpod_ft.cluster.hyperpod.api import HyperPodCluster, Node
    from hyperpod_ft.cluster.hyperpod.events import Event
    from hyperpod_ft.cluster.inspection import ClusterOverview
    from hyperpod_ft.cluster.observability import Extension
    from hyperpod_ft.cluster.plans import Offer
    from hyperpod_ft.cluster.stack.stack import Remaining


def print_to_stderr(line: str) -> None:
    """Print a line to stderr: stdout belongs to the remote command."""
    print(line, file=sys.stderr, flush=True)


def problems(found: Sequence[str], as_json: bool) -> int:
    """Print the errors in the cluster file itself; returns the exit code."""
    if as_json:
        tables.print_json({"findings": [{"verdict": "error", "problem": text} for text in found]})
    else:
        for text in found:
            print(f"error: {text}")
    return 1


def status(overview: ClusterOverview, as_json: bool, *, nodes: bool = False) -> int:
    """Print a cluster, its groups or its nodes, and what is wrong with them; returns the exit code."""
    from hyperpod_ft.cluster.hyperpod.api import FAILED

    cluster, found = overview.cluster, overview.nodes
    if as_json:
        report = {
            **asdict(cluster),
            "id": cluster.id,
            "complete": cluster.complete,
            "nodes": [asdict(node) for node in found],
            "missing": overview.missing,
            "warnings": overview.warnings,
        }
        tables.print_json(report)
    else:
        print(f"{cluster.name}  {cluster.status}  {cluster.arn}")
        if cluster.failure:
            print(f"failure: {cluster.failure}")
        if nodes:
            _nodes(found)
        else:
            _groups(cluster, found)
        for name, reason in overview.missing.items():
            print(f"{name} lacks instances: {reason}")
        for name, text in overview.warnings.items():
            print(f"warning: {name}: when it was provisioned: {text}")
    failed = cluster.status == FAILED or any(node.failed for node in found)
    return 1 if failed else 0


def _groups(cluster: HyperPodCluster, nodes: list[Node]) -> None:
    from hyperpod_ft.cluster.hyperpod.api import tally

    table = tables.table("group", "role", "type", "instances", "nodes")
    for group in cluster.groups:
        members = [node for node in nodes if node.group == group.name]
        instances = f"{group.current} of {group.target}"
        table.add_row(group.name, group.node_type.lower(), group.instance_type, instances, tally(members))
    tables.console().print(table)
    for line in dict.fromkeys(
        f"{node.group} {node.instance_id}".strip() + f": {node.message}" for node in nodes if node.message
    ):
        print(line)


def _nodes(found: list[Node]) -> None:
    table = tables.table("group", "instance", "host", "type", "state", "since")
    for node in found:
        since = datetime.fromtimestamp(node.launched, timezone.utc).strftime("%Y-%m-%d %H:%M") if node.launched else ""
        state = f"{node.status}: {node.message}" if node.message else node.status
        table.add_row(node.group, node.instance_id, node.hostname, node.instance_type, state, since)
    tables.console().print(table)


def events(found: Sequence[Event], as_json: bool) -> None:
    if as_json:
        tables.print_json([asdict(event) for event in found])
        return
    table = tables.table("time", "level", "group", "instance", "event")
    for event in found:
        table.add_row(event.date, event.level, event.group, event.instance_id, event.text)
    tables.console().print(table)


def offers(found: Sequence[Offer], region: str, as_json: bool) -> None:
    if as_json:
        tables.print_json([asdict(offer) | {"per_instance_hour": offer.per_instance_hour} for offer in found])
        return
    if not found:
        print("AWS offers none: try another --from, --days, --count or --region")
        return
    table = tables.table("start (UTC)", "days", "instances", "zone", "paid in advance", "an instance-hour", "offer")
    for offer in found:
        fee, hourly = f"{offer.fee:,.2f} {offer.currency}", f"{offer.per_instance_hour:,.2f}"
        instances, days = f"{offer.instances} x {offer.instance_type}", f"{offer.hours / 24:.3g}"
        table.add_row(offer.start, days, instances, ", ".join(offer.zones), fee, hourly, offer.id)
    tables.console().print(table)
    print(f"To buy one, for good: aws sagemaker create-training-plan --region {region} --training-plan-name NAME")
    print("  --training-plan-offering-id OFFER")


def remains(left: Remaining, name: str, region: str) -> None:
    """Print the remaining resources of a cluster that cost money."""
    lines = _costs(left)
    print(f"Remaining in {region}, costs money:" if lines else f"Nothing that costs money remains in {region}.")
    for line in lines:
        print(f"  {line}")
    if lines:
        print("`hyperpod-ft cluster create` uses it again. To delete the data too:")
        print(f"  hyperpod-ft cluster delete {name} --region {region} --delete-data")


def _costs(remains: Remaining) -> list[str]:
    """The remaining resources that cost money, a line each."""
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


def created(config: ClusterConfig, cluster: HyperPodCluster, file: Path) -> None:
    worker = config.workers[0]
    count = cluster.group(worker.name).target
    print(
        f"{cluster.name} is complete: {', '.join(f'{group.current} {group.instance_type}' for group in cluster.groups)}"
    )
    print(f"Log in:      hyperpod-ft cluster ssh {file}")
    print(
        f"In run files: cluster.root: {config.fsx.mount_path}/<user>/hyperpod-ft, "
        f"instance_type: {worker.instance_type}, nodes: {count}, partition: {worker.slurm_partition}"
    )
    print(f"Instances cost money until: hyperpod-ft cluster delete {file}")
    print(f"File system and bucket until: hyperpod-ft cluster delete {file} --delete-data")


def extension(installed: Extension | None, as_json: bool) -> None:
    if as_json:
        tables.print_json(installed and asdict(installed))
    elif installed is None:
        print("not installed")
    else:
        print(f"{installed.version}  {installed.status}  {installed.active} of {installed.total} nodes")
        for line in (*installed.issues, installed.settings):
            if line:
                print(line)
