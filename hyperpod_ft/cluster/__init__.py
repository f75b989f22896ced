"""What `hyperpod-ft cluster` does with a cluster: create, look, change, delete."""
