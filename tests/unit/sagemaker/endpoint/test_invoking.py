"""Talking to an endpoint: the pieces of its answers, and the token for other clients."""

import base64
from typing import Any
from urllib.parse import parse_qs

import pytest
from botocore.credentials import Credentials

from hyperpod_ft.errors import UserError
from hyperpod_ft.sagemaker.endpoint.invoking import base_url, bearer_token, piece_of


def test_the_token_is_a_presigned_request() -> None:
    token = bearer_token(Credentials("AKIDEXAMPLE", "secret", "session"), "us-west-2")
    assert token.startswith("sagemaker-api-key-")
    host, _, query = base64.b64decode(token.removeprefix("sagemaker-api-key-")).decode().partition("/?")
    values = {key: one[0] for key, one in parse_qs(query).items()}
    assert host == "sagemaker.amazonaws.com"
    assert values["Action"] == "CallWithBearerToken"
    assert values["Version"] == "1"
    assert values["X-Amz-Expires"] == str(12 * 3600)
    assert values["X-Amz-Credential"].endswith("/us-west-2/sagemaker/aws4_request")
    assert values["X-Amz-Security-Token"] == "session"
    assert "secret" not in query.replace("session", "")


def test_without_credentials_there_is_no_token() -> None:
    with pytest.raises(UserError, match="no AWS credentials"):
        bearer_token(None, "us-west-2")


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"text": "a"}, "a"),
        ({"delta": {"role": "assistant", "content": ""}}, ""),
        ({"delta": {"content": "a"}}, "a"),
        ({"delta": {"content": None, "reasoning": "hm"}}, "hm"),
        ({"delta": {"reasoning_content": "hm"}}, "hm"),
        ({}, ""),
    ],
)
def test_a_piece_of_an_answer(choice: dict[str, Any], text: str) -> None:
    assert piece_of(choice) == text


def test_the_base_url_names_the_component_of_an_endpoint_that_scales_to_zero() -> None:
    runtime = "https://runtime.sagemaker.us-west-2.amazonaws.com"
    assert base_url(runtime, "e") == f"{runtime}/endpoints/e/openai/v1"
    assert base_url(runtime, "e", "e-model") == f"{runtime}/endpoints/e/inference-components/e-model/openai/v1"
