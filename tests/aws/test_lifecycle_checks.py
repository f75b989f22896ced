"""The lifecycle scripts in S3: there, unchanged, and not the nodes' to change."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from hyperpod_ft.cluster.create import upload
from hyperpod_ft.cluster.hyperpod import lifecycle_files
from hyperpod_ft.cluster.validation.permission_checks import SCRIPTS
from hyperpod_ft.findings import Finding
from tests.aws.account_place import ROLE_ACTIONS, Place, allow, clients, cluster, of, only


def test_a_cluster_that_has_lost_its_lifecycle_scripts(place: Place) -> None:
    cluster(place, "demo", 2)
    clients(place.aws)("s3").delete_object(Bucket=place.bucket, Key="lifecycle/provision.sh")
    errors = [finding for finding in place.check().findings if finding.verdict == "error"]
    assert len(errors) == 2
    assert "s3://sagemaker-mine/lifecycle/provision.sh" in errors[0].found


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda s3, key: s3.put_object(**key("provision.sh"), Body=b"#!/bin/bash\nid\n"), "provision.sh"),
        (lambda s3, key: s3.put_object(**key("provision/json.py"), Body=b""), "provision/json.py"),
        (lambda s3, key: s3.delete_object(**key("a.py")), "a.py"),
        (lambda s3, key: s3.put_object(**key("SHA256SUMS"), Body=b"x"), "SHA256SUMS"),
        (lambda s3, key: None, ""),
    ],
    ids=["entry", "added", "removed", "manifest", "unchanged"],
)
def test_changed_scripts_are_named(
    place: Place, change: Callable[[Any, Callable[[str], dict[str, str]]], None], named: str
) -> None:
    """provision.sh too, which cannot check itself. Uploading the scripts again repairs each case."""
    s3, content = clients(place.aws)("s3"), {"provision.sh": b"#!/bin/bash\n", "a.py": b"1\n"}
    folder = upload(place.config(), place.bucket, content, s3, lambda _: None)
    assert folder.startswith("lifecycle/demo/")
    cluster(place, "demo", 2, folder=folder)
    change(s3, lambda name: {"Bucket": place.bucket, "Key": f"{folder}/{name}"})

    def findings() -> list[Finding]:
        return [finding for finding in of(place.check(), SCRIPTS) if "not as it was uploaded" in finding.found]

    if named:
        assert f"{folder}: not as it was uploaded: {named};" in only(findings()).found
    else:
        assert findings() == []
    upload(place.config(), place.bucket, content, s3, lambda _: None)
    assert findings() == []


def of_role(place: Place) -> list[Finding]:
    return of(place.check(), "existing.execution_role_arn")


def test_a_role_that_may_change_the_scripts(place: Place) -> None:
    iam = clients(place.aws)("iam")
    allow(iam, "hyperpod", *ROLE_ACTIONS, "s3:PutObject")
    finding = only(of_role(place))
    assert finding.verdict == "warning"
    assert "hyperpod may s3:PutObject on the lifecycle scripts in sagemaker-mine" in finding.found
    assert "arn:aws:s3:::sagemaker-mine/lifecycle/*" in finding.remedy
    below = f"arn:aws:s3:::{place.bucket}/{lifecycle_files.PREFIX}/*"
    statement = {"Effect": "Deny", "Action": ["s3:PutObject", "s3:DeleteObject"], "Resource": below}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    iam.put_role_policy(RoleName="hyperpod", PolicyName="scripts", PolicyDocument=policy)
    assert of_role(place) == []
