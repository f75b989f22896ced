"""Makes the virtual environments of stages and trackers from pinned packages, and inspects those of interpreters."""
