"""`hyperpod-ft doctor`: checks that a cluster is as the kit assumes, each reported as a row."""
