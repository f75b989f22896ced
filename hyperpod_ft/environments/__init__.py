"""Makes the virtual environments of stages and trackers from pinned packages, and looks what an interpreter has."""
