"""Run files and cluster files: their keys and checks, and how they are read into frozen models."""
