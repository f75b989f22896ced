"""What commands import and parse, with what they ask AWS with: forks of the process that has it start at once."""

import functools

import boto3
import botocore.session
import rich.console
import rich.table  # noqa: F401
import typer.main

import hyperpod_ft.cli.main
import hyperpod_ft.cli.submitting
import hyperpod_ft.cluster.create
import hyperpod_ft.cluster.inspection
import hyperpod_ft.cluster.maintenance
import hyperpod_ft.cluster.observability
import hyperpod_ft.cluster.ssh.connect
import hyperpod_ft.download.assets
import hyperpod_ft.launch.preflight
import hyperpod_ft.launch.submit
import hyperpod_ft.sagemaker.endpoint.operations
from hyperpod_ft.aws.checks import service_model

# the commands as the program would build them, each time from all their functions' parameters
typer.main.get_command = functools.cache(typer.main.get_command)
typer.main.get_command(hyperpod_ft.cli.main.app)
# botocore's descriptions of services: each session would parse them anew, a tenth of a second for a large one
botocore.session.create_loader = functools.cache(botocore.session.create_loader)
for service in ("sagemaker", "cloudformation", "ec2", "iam", "s3", "fsx", "service-quotas", "sts", "logs"):
    boto3.Session("-", "-").client(service, "us-west-2")
service_model.model("sagemaker")
