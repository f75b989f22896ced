"""Skips tests of nodes where there can be no containers. No test here asks the machine's own instance metadata."""

import os

import pytest

from tests.lifecycle.nodes import SYSTEMD, why_not_here


@pytest.fixture(autouse=True)
def _no_instance_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_IMDS", "http://127.0.0.1:9")


@pytest.fixture(scope="session")
def nodes_possible() -> None:
    """Skip where nodes cannot start; root without the packages, where Slurm must be, is a failure."""
    if reason := why_not_here(SYSTEMD):
        if os.geteuid() == 0 and (os.environ.get("CI") or os.environ.get("HYPERPOD_FT_REQUIRE_SLURM") == "1"):
            pytest.fail(reason)
        pytest.skip(reason)
