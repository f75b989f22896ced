"""Checks of models, adapters and sharded checkpoints."""
