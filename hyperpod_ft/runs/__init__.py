"""A run on the shared volume: its paths, its records, what is done and what happened."""
