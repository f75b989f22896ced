"""Fetching models and raw datasets: the Hub, S3 or local files to one shared, complete directory each."""
