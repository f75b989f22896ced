"""`hyperpod-ft cluster`: create a cluster, look at it, change it, delete it."""
