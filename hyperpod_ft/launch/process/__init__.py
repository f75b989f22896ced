"""Launcher `process`: a run's scripts as plain processes of this machine."""
