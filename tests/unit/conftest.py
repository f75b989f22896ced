"""Chance: the examples of hypothesis, which is not installed where the tests of engine neuron run, and torch's numbers.

What a test finds, it finds when it is written, whatever ran before it in the same process.
"""

import sys

import hypothesis
import pytest

# The same examples in each run, however slow.
hypothesis.settings.register_profile(
    "here", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("here")


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
