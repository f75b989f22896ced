"""Checkpoints of neuronx-distributed."""
