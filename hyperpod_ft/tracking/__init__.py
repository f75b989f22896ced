"""Experiment trackers: a program beside training publishes metrics.jsonl to them (follower.py)."""
