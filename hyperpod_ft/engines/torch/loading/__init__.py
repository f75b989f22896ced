"""Each rank reads its own part of the base model."""
