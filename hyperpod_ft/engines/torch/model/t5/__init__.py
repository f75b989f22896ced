"""T5 and Flan-T5: what differs from causal models."""
