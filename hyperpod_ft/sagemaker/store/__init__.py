"""A run in a store: what is pushed and pulled, when a checkpoint counts, and how the client keeps up."""
