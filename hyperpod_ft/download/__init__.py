"""Fetches models and raw datasets from the Hub, S3 or local files to shared directories, complete or not at all."""
