"""The model on a rank: its layers, what they compute and keep, and how they are split, cut and compiled."""
