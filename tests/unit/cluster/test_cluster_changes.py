"""What a cluster file asks for that a cluster which is there has otherwise."""

import copy
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.cluster.hyperpod import requests
from hyperpod_ft.cluster.hyperpod.changes import changes, provisioning_differs
from tests.unit.config.test_cluster_file import RDS, RESOURCES, URI, load

WORKER = {"name": "workers-1", "instance_type": "ml.trn1.32xlarge", "count": 2}


def described(request: dict[str, Any]) -> dict[str, Any]:
    """As DescribeCluster tells of what was asked for: counts under other names, and more than was asked for."""
    groups = copy.deepcopy(request["InstanceGroups"])
    for group in groups:
        group["TargetCount"] = group["CurrentCount"] = group.pop("InstanceCount")
        if "MinInstanceCount" in group:
            group["MinCount"] = group.pop("MinInstanceCount")
        group["Status"] = "InService"
        group["InstanceStorageConfigs"].reverse()
        group["InstanceStorageConfigs"].append({"EbsVolumeConfig": {"VolumeSizeInGB": 100, "RootVolume": True}})
    return {**request, "InstanceGroups": groups, "ClusterStatus": "InService"}


def reported(tmp_path: Path, **edited: Any) -> list[str]:
    made = requests.create_cluster(load(tmp_path), RESOURCES, URI)
    config = load(tmp_path, **edited)
    return list(changes(config, requests.create_cluster(config, RESOURCES, URI), described(made)).other)


def test_nothing_differs_from_what_was_asked_for(tmp_path: Path) -> None:
    assert reported(tmp_path) == []


@pytest.mark.parametrize(
    ("edited", "said"),
    [
        ({"workers": [{**WORKER, "count": 5}]}, "workers.0.count: workers-1 has 2 instances, not 5"),
        (
            {"workers": [{**WORKER, "instance_type": "ml.trn1n.32xlarge", "partition": "trn1"}]},
            "workers.0.instance_type: workers-1 has",
        ),
        ({"workers": [{**WORKER, "min_count": 1}]}, "workers.0.min_count: workers-1 has none, not 1; cannot be"),
        ({"workers": [{**WORKER, "partition": "gpu"}]}, "workers.0.partition: workers-1 has"),
        ({"workers": [{**WORKER, "threads_per_core": 2}]}, "workers.0.threads_per_core: workers-1 has 1, not 2"),
        ({"workers": [{**WORKER, "volume_gb": 600}]}, "workers.0.volume_gb: workers-1 has"),
        ({"workers": [{**WORKER, "deep_health_checks": ["InstanceStress"]}]}, "workers.0.deep_health_checks:"),
        (
            {"workers": [{**WORKER, "auto_patch": "WhenIdle"}]},
            "workers.0.auto_patch: workers-1 has none, not {'PatchingStrategy': 'WhenIdle'}:"
            " hyperpod-ft cluster auto-patch ml WhenIdle --group workers-1 --region us-west-2",
        ),
        (
            {"workers": [{**WORKER, "image_id": "ami-0123456789abcdef0"}]},
            "workers.0.image_id: workers-1 has none, not ami-0123456789abcdef0:"
            " hyperpod-ft cluster update ml --group workers-1 --image ami-0123456789abcdef0 --region us-west-2",
        ),
        ({"controller": {"instance_type": "ml.m5.xlarge"}}, "controller.instance_type: controller-machine"),
        (
            {"node_recovery": "None"},
            "node_recovery: is Automatic, not None: hyperpod-ft cluster node-recovery ml None --region us-west-2",
        ),
        (
            {"workers": [{**WORKER, "name": "w"}]},
            "instance group workers-1 is not in the cluster file: hyperpod-ft cluster delete-group ml workers-1",
        ),
        (RDS, "accounting_database: is none, not {'Endpoint': 'jobs.c1.us-west-2.rds.amazonaws.com'"),
    ],
)
def test_every_key_that_stays_is_reported(tmp_path: Path, edited: dict[str, Any], said: str) -> None:
    (line,) = reported(tmp_path, **edited)
    assert line.startswith(said)


def test_the_least_number_of_instances_is_as_asked_for(tmp_path: Path) -> None:
    config = load(tmp_path, workers=[{**WORKER, "min_count": 2}])
    request = requests.create_cluster(config, RESOURCES, URI)
    assert [group.get("MinInstanceCount") for group in request["InstanceGroups"]] == [None, 2]
    assert changes(config, request, described(request)).other == ()
    (line,) = changes(load(tmp_path), requests.create_cluster(load(tmp_path), RESOURCES, URI), described(request)).other
    assert line.startswith("workers.0.min_count: workers-1 has 2, not none")


def test_a_database_that_the_cluster_file_no_longer_names_is_reported(tmp_path: Path) -> None:
    made = requests.create_cluster(load(tmp_path, **RDS), RESOURCES, URI)
    assert changes(load(tmp_path, **RDS), made, described(made)).other == ()
    config = load(tmp_path)
    (line,) = changes(config, requests.create_cluster(config, RESOURCES, URI), described(made)).other
    assert line.endswith("not none; only the first `create` sets it")


def test_new_groups_are_added_and_new_scripts_reach_the_others(tmp_path: Path) -> None:
    made = requests.create_cluster(load(tmp_path), RESOURCES, URI)
    config = load(tmp_path, workers=[WORKER, {**WORKER, "name": "workers-2", "count": 3}])
    found = changes(config, requests.create_cluster(config, RESOURCES, "s3://other/scripts"), described(made))
    assert found.added == {"workers-2": 3}
    assert found.other == ()
    groups = {group["InstanceGroupName"]: group for group in found.groups}
    assert set(groups) == {"controller-machine", "workers-1", "workers-2"}
    assert all(group["LifeCycleConfig"]["SourceS3Uri"] == "s3://other/scripts" for group in groups.values())
    assert groups["workers-1"]["InstanceCount"] == 2


def test_the_kind_of_provisioning_cannot_be_changed(tmp_path: Path) -> None:
    there = described(requests.create_cluster(load(tmp_path), RESOURCES, URI))
    assert not provisioning_differs(load(tmp_path), there)
    assert provisioning_differs(load(tmp_path, provisioning="legacy"), there)
