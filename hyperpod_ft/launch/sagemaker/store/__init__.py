"""A run in a store: what is pushed and pulled, when a checkpoint counts, and where the kit sees the run."""
