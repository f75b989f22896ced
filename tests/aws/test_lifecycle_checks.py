"""The lifecycle scripts in S3: there, unchanged, and not the nodes' to change."""

import json

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


def test_changed_scripts_are_named(place: Place) -> None:
    """provision.sh too, which cannot check itself. Uploading the scripts again repairs each case."""
    s3, content = clients(place.aws)("s3"), {"provision.sh": b"#!/bin/bash\n", "a.py": b"1\n"}

    def repaired() -> str:
        return upload(place.config(), place.bucket, content, s3, lambda _: None)

    def findings() -> list[Finding]:
        return [finding for finding in of(place.check(), SCRIPTS) if "not as it was uploaded" in finding.found]

    folder = repaired()
    assert folder.startswith("lifecycle/demo/")
    cluster(place, "demo", 2, folder=folder)
    assert findings() == []
    for name, body in (("provision.sh", b"id\n"), ("provision/json.py", b""), ("a.py", None), ("SHA256SUMS", b"x")):
        key = {"Bucket": place.bucket, "Key": f"{folder}/{name}"}
        if body is None:
            s3.delete_object(**key)
        else:
            s3.put_object(**key, Body=body)
        assert f"{folder}: not as it was uploaded: {name};" in only(findings()).found
        repaired()
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
