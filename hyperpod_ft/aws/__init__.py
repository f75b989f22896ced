"""The cluster itself: its file, the AWS resources it is made of, and the way onto its nodes.

boto3 is imported by `session` alone, and only when something is asked of AWS: commands answer at once.
"""
