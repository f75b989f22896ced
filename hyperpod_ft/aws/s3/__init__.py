"""Trees of files in Amazon S3: list, push, pull, verified by digest. Knows nothing of runs."""
