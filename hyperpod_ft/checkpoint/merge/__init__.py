"""Merging adapters into their base model."""
