"""The CloudFormation stack with a cluster's network, role, bucket and file system."""
