"""No test here asks the machine's own instance metadata."""

import pytest


@pytest.fixture(autouse=True)
def _no_instance_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_IMDS", "http://127.0.0.1:9")
