"""The types of fields that name something of AWS, in cluster files and run files; patterns as botocore's models."""

from typing import Annotated

from hyperpod_ft.config.fields import matches

Region = Annotated[str, matches(r"[a-z]{2,4}(-[a-z]+)+-\d", "an AWS region, such as us-west-2")]
RoleArn = Annotated[str, matches(r"arn:aws[a-z-]*:iam::\d{12}:role/?[a-zA-Z_0-9+=,.@\-_/]+", "the ARN of a role")]
Subnet = Annotated[str, matches(r"subnet-[0-9a-f]{8,17}", "the id of a subnet")]
SecurityGroup = Annotated[str, matches(r"sg-[0-9a-f]{8,17}", "the id of a security group")]
FileSystemId = Annotated[str, matches(r"fs-[0-9a-f]{8,17}", "the id of a file system")]
TrainingPlanArn = Annotated[
    str, matches(r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:\d{12}:training-plan/.+", "the ARN of a training plan")
]
