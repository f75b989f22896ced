"""What commands that ask AWS import: forks of the process that has imported it start at once (tests/forking.py)."""

import boto3  # noqa: F401

import hyperpod_ft.aws.maintenance
import hyperpod_ft.aws.observability
import hyperpod_ft.aws.operations
import hyperpod_ft.cli.main
import hyperpod_ft.serving.endpoint.operations  # noqa: F401
