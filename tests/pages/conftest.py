"""The stand-in for AWS, for pages whose commands ask it."""

from tests.aws.conftest import _server, aws  # noqa: F401
