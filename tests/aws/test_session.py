"""Errors between a user and AWS are one line and contain no secrets; the stand-in raises them."""

import re
import sys
from pathlib import Path

import pytest

from hyperpod_ft.aws.session import Session, explained, redacted
from hyperpod_ft.errors import UserError
from tests.aws.conftest import Aws


def list_clusters(session: Session) -> None:
    with explained("cluster c"):
        session.client("sagemaker").list_clusters()


@pytest.mark.parametrize(
    ("code", "message", "expected"),
    [
        (
            "AccessDeniedException",
            "User: arn:aws:sts::1:assumed-role/a/b is not authorized to perform: sagemaker:ListClusters on resource: *",
            "access denied to sagemaker:ListClusters (AccessDeniedException); grant these credentials sage",
        ),
        ("UnauthorizedOperation", "You are not authorized.", "access denied to ListClusters (UnauthorizedOperation)"),
        ("ExpiredTokenException", "expired", "the AWS credentials have expired (ExpiredTokenException); renew"),
        ("UnrecognizedClientException", "no", "AWS rejected the credentials (UnrecognizedClientException); renew"),
        ("RequestTimeTooSkewed", "too large", "AWS rejected the credentials (RequestTimeTooSkewed); renew"),
        ("ThrottlingException", "Rate exceeded", "AWS throttled ListClusters (ThrottlingException); wait a minute"),
        ("ValidationException", "x is bad", "AWS refused ListClusters with ValidationException: x is bad"),
    ],
)
def test_refusals(aws: Aws, monkeypatch: pytest.MonkeyPatch, code: str, message: str, expected: str) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    aws.scenario(errors=[{"service": "sagemaker", "code": code, "message": message, "times": 9}])
    with pytest.raises(UserError, match=re.escape(f"cluster c: {expected}")):
        list_clusters(Session())


def test_a_call_that_is_throttled_is_made_again(aws: Aws) -> None:
    aws.scenario(errors=[{"service": "sagemaker", "code": "ThrottlingException", "times": 2}])
    list_clusters(Session())
    assert len(aws.requests()) == 3


@pytest.mark.usefixtures("aws")
def test_without_credentials_region_or_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cluster c: no such AWS profile; correct AWS_PROFILE"):
        list_clusters(Session(profile="none"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(UserError, match=r"AWS cannot be reached \(EndpointConnectionError\); check the network"):
        list_clusters(Session())
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(UserError, match="cluster c: incomplete AWS credentials"):
        list_clusters(Session())
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(UserError, match="cluster c: no AWS credentials; set AWS_PROFILE"):
        list_clusters(Session())
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    with pytest.raises(UserError, match=r"cluster c: no AWS region; .*--region"):
        list_clusters(Session())


def test_without_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UserError, match=re.escape("cluster c: boto3 is not installed; install it: ")):
        list_clusters(Session())


def test_the_environments_profile_unless_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read once, since ssh's configuration and the AWS CLI get it as an argument."""
    monkeypatch.setenv("AWS_PROFILE", "mine")
    session = Session()
    monkeypatch.setenv("AWS_PROFILE", "")
    assert (session.profile, Session(profile="other").profile, Session().profile) == ("mine", "other", None)


@pytest.mark.parametrize(
    "text",
    [
        "GET https://b.s3.amazonaws.com/k?X-Amz-Credential=SECRET%2F1&X-Amz-Signature=SECRET&X-Amz-Security-Token=SECRET",
        "https://b.s3.amazonaws.com/k?AWSAccessKeyId=SECRET&Signature=SECRET%3D&Expires=1",
        "The security token of AKIASECRETSECRETSECR is invalid",
        "ASIASECRETSECRETSECR",
    ],
)
def test_no_secret_is_shown(text: str) -> None:
    assert "SECRET" not in redacted(text)
