"""From a RunConfig to a Plan: pure functions that start no program."""
