"""`hyperpod-ft sagemaker`: what training jobs and endpoints need in an account. boto3 is imported late."""

from typing import TYPE_CHECKING, Annotated

import typer

from hyperpod_ft.cli.options import Confirm, Json, Profile, command_group, require_name
from hyperpod_ft.cli.output import tables

if TYPE_CHECKING:
    from hyperpod_ft.aws.session import Session

app = typer.Typer(
    name="sagemaker",
    cls=command_group(),
    help="Set up and check what SageMaker training jobs need: a role, a bucket, quotas.",
    no_args_is_help=True,
)

Region = Annotated[str | None, typer.Option("--region", help="AWS region. Default: the AWS CLI's.")]
Name = Annotated[str, typer.Option("--name", help="Name of the CloudFormation stack.")]
STACK = "hyperpod-ft-training"


@app.command()
def setup(
    name: Name = STACK,
    file_system: Annotated[
        bool, typer.Option("--file-system", help="Let jobs mount a file system too (sagemaker.file_system).")
    ] = False,
    mail: Annotated[
        str | None,
        typer.Option("--mail", metavar="ADDRESS", help="Address for mail about failed and stopped jobs. Empty: none."),
    ] = None,
    print_template: Annotated[bool, typer.Option("--print", help="Print the template; create nothing.")] = False,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Create an execution role with least privilege and a bucket, as a CloudFormation stack.

    Prints the section for the run file. Safe to run again: an existing stack is updated.
    """
    from hyperpod_ft.sagemaker import resources as training_resources

    if print_template:
        print(training_resources.template(), end="")
        return
    session = _session(region, profile)
    made = training_resources.deploy(session, tables.progress, name=name, file_system=file_system, mail=mail)
    if mail:
        print(f"AWS asks {mail} to confirm. Mails cost what SNS bills: https://aws.amazon.com/sns/pricing/")
    print("For the run file:\n")
    print(f"sagemaker:\n  region: {made.region}\n  role: {made.role_arn}")
    if file_system:
        print(f"  output: s3://{made.bucket}/hyperpod-ft")
        print("  file_system:               # id, directory, subnets, security_groups: docs/run-file.md")
    else:
        print(f"  store: s3://{made.bucket}/hyperpod-ft")


@app.command()
def validate(
    run_file: Annotated[str, typer.Argument(metavar="RUN_FILE", help="A run file, or the name of a packaged recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. sagemaker.spot=true.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Check without an AWS account or network.")] = False,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Check that a run can become training jobs, before money is spent; exit code 1 if there are errors."""
    from hyperpod_ft.config import run_file as run_files
    from hyperpod_ft.runs.run import Run
    from hyperpod_ft.sagemaker import validation
    from hyperpod_ft.sagemaker.section import sagemaker_section

    run = Run.of(run_files.load(run_files.find(run_file), overrides or ()))
    client = None if offline else _session(sagemaker_section(run.config).region, profile).client
    raise typer.Exit(tables.validated(validation.validate(run, client), as_json))


@app.command()
def delete(
    name: Name = STACK,
    delete_data: Annotated[
        bool, typer.Option("--delete-data", help="Also delete the bucket with all its data, irrevocably.")
    ] = False,
    confirm: Confirm = None,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Delete the role, and with --delete-data the bucket. Prints what still costs money."""
    from hyperpod_ft.progress import format_bytes
    from hyperpod_ft.sagemaker import resources as training_resources

    what = "and its bucket with all data" if delete_data else "but not its bucket"
    print(f"This deletes stack {name}, {what}.")
    require_name(name, confirm)
    session = _session(region, profile)
    left = training_resources.delete(session, tables.progress, name=name, delete_data=delete_data)
    if left:
        print(f"Kept, and billed by its size: s3://{left.name} ({format_bytes(left.bytes)})")
        print(f"To delete it with its data, irrevocably: aws s3 rb --force s3://{left.name}")
    else:
        print("Nothing is left that costs money, except a bucket that an earlier deletion has kept (`aws s3 ls`).")


def _session(region: str | None, profile: str | None) -> "Session":
    from hyperpod_ft.aws.session import Session

    return Session(region, profile)
