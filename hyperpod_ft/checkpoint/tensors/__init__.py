"""Descriptions of tensors, and their bytes."""
