"""The cluster in AWS: its stack, its requests, its nodes. boto3 is imported inside functions only."""
