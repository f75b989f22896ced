"""`hyperpod-ft doctor`: the kit's assumptions about a cluster, each looked at and reported as a row."""
