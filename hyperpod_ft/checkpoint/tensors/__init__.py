"""Logical tensors: where they are stored, and reading, converting and comparing their elements."""
