"""The examples that hypothesis makes up. Here, since it is not installed where the tests of engine neuron run."""

import hypothesis

# The same examples in each run, however slow: what a test finds, it finds when it is written.
hypothesis.settings.register_profile(
    "here", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("here")
