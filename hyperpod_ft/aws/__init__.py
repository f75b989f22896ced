"""What clusters, training jobs and endpoints need of AWS: S3, logs, CloudFormation, and checks of an account.

boto3 is imported only when AWS is called, so that commands start fast.
"""
