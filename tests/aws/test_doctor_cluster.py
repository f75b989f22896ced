"""`hyperpod-ft cluster doctor`, as users run it, against the server that stands in for AWS (server.py)."""

import json

from tests.aws.kit import NAME, Kit
from tests.aws.test_events import NO_CAPACITY


def verdicts(kit: Kit, *arguments: str, status: int = 0) -> dict[str, str]:
    rows = json.loads(kit.run_any("cluster", "doctor", *arguments, "--json", status=status))
    return {row["name"]: row["verdict"] for row in rows}


def test_a_cluster_from_outside(kit: Kit) -> None:
    kit.run("create")
    by_name = verdicts(kit, NAME, "--region", kit.aws.region)
    assert by_name.pop("programs for ssh") in ("ok", "cannot tell")
    assert by_name == dict.fromkeys(
        [
            *("cluster", "group controller-machine", "group worker-group-1"),
            *("quota of ml.c5.xlarge", "quota of ml.trn1.32xlarge"),
        ],
        "ok",
    )
    by_file = verdicts(kit, "cluster.yaml")
    assert by_file["validate"] == "ok"
    assert "differs" not in by_file.values()

    kit.run_any("cluster", "doctor", NAME, "--region", kit.aws.region, "--report", "report.txt")
    report = (kit.directory / "report.txt").read_text()
    assert "worker-group-1" in report
    assert "123456789012" not in report

    kit.aws.scenario(capacity={"ml.trn1.32xlarge": 1})
    kit.run("scale", NAME, "worker-group-1", "2", "--region", kit.aws.region, "--no-wait")
    kit.aws.scenario(capacity={"ml.trn1.32xlarge": 1}, quotas={"ml.trn1.32xlarge for cluster usage": 1})
    by_name = verdicts(kit, NAME, "--region", kit.aws.region, status=1)
    assert by_name["group worker-group-1"] == "differs"
    assert by_name["quota of ml.trn1.32xlarge"] == "differs"
    shown = kit.run_any("cluster", "doctor", "cluster.yaml", "--json", status=1)
    (group,) = [row for row in json.loads(shown) if row["name"] == "group worker-group-1"]
    assert group["verdict"] == "differs"
    assert NO_CAPACITY in group["found"], "which only events have"

    assert "no cluster 'other'" in kit.run_any("cluster", "doctor", "other", "--region", kit.aws.region, status=2)


def test_lifecycle_scripts_that_were_changed(kit: Kit) -> None:
    """Nodes would run them as root. The cluster exists, which alone is no reason for a row."""
    kit.run("create")
    group = kit.aws.client("sagemaker").describe_cluster(ClusterName=NAME)["InstanceGroups"][0]
    bucket, _, folder = group["LifeCycleConfig"]["SourceS3Uri"].removeprefix("s3://").partition("/")
    kit.aws.client("s3").put_object(Bucket=bucket, Key=f"{folder}/provision.sh", Body=b"#!/bin/bash\nid\n")
    by_file = verdicts(kit, "cluster.yaml", status=1)
    assert by_file["lifecycle scripts"] == "differs"
    assert "name" not in by_file
    kit.aws.scenario(errors=[{"service": "s3", "code": "AccessDenied", "message": "no", "times": 99}])
    assert verdicts(kit, "cluster.yaml")["name"] == "cannot tell", "what could not be checked is not left out"
