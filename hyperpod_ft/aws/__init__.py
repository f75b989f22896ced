"""A cluster in an AWS account: its resources, its checks, and access to its nodes.

Only `session` imports boto3, and only when AWS is called, so that commands start fast.
"""
