"""Base model plus adapters to a model."""
