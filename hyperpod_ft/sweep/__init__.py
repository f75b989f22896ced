"""Sweeps: one run file with many settings, submitted as one run each."""
