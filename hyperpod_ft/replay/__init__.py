"""A step of a run's training again, to compare its figures with the recorded ones."""
