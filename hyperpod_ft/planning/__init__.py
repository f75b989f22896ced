"""From a RunConfig to a Plan: pure functions; no subprocesses."""
