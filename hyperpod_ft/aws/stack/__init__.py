"""The CloudFormation stack that a cluster stands on."""
