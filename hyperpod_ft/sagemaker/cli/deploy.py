"""`hyperpod-ft deploy`: each command parses, calls one function and prints. boto3 is imported late."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyperpod_ft.cli.options import (
    A_RUN,
    Json,
    Profile,
    RunReference,
    Yes,
    command_group,
    interruptible,
    only,
    require_yes,
)
from hyperpod_ft.cli.output import tables
from hyperpod_ft.sagemaker.cli import show as show_endpoints

if TYPE_CHECKING:
    from hyperpod_ft.runs.run import Run
    from hyperpod_ft.sagemaker.endpoint.operations import EndpointOperations


app = typer.Typer(
    name="deploy",
    cls=command_group("create"),
    help="A SageMaker endpoint for the tuned model. `deploy RUN` creates it.",
    no_args_is_help=True,
)

_ENDPOINT = typer.Argument(metavar="RUN", help=f"An endpoint's name, or {A_RUN}")
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. deploy.instances=2."),
]
Region = Annotated[
    str | None, typer.Option("--region", help="Region. Default: the run file's, or that of the AWS configuration.")
]


@app.command()
def create(
    run: RunReference = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print requests, fit and price, check quota and role; create nothing."),
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep what was created if the container fails.")] = False,
    profile: Profile = None,
) -> None:
    """Upload the tuned model, create its endpoint, wait, and compare its answers with samples.json.

    Safe to run again after an interruption. Exit code 1 when the endpoint does not answer like the tuned model.
    """
    found = _run(run, overrides)
    operations = _operations(found, None, profile)
    deployment = operations.preview(found)
    show_endpoints.preview(deployment, operations.price(deployment.target.settings.instance_type))
    if dry_run:
        show_endpoints.requests(deployment)
    operations.check(deployment)
    if dry_run:
        return
    with interruptible(_kept(deployment.target.name, deployment.delete_command)):
        proof = operations.deploy(deployment, keep=keep)
    raise typer.Exit(show_endpoints.deployed(deployment, proof))


@app.command()
def register(
    run: RunReference = None,
    group: Annotated[
        str | None, typer.Option("--group", help="Model package group. Default: the run file's name.")
    ] = None,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the requests; create nothing.")] = False,
    profile: Profile = None,
) -> None:
    """Register the tuned model in SageMaker's Model Registry, with its scores, for approval.

    Copies its files to registry/ of the store.

    Safe to run again after an interruption.
    """
    from hyperpod_ft.sagemaker.endpoint.registry import registration

    found = _run(run, overrides)
    operations = _operations(found, None, profile)
    planned = operations.preview(found)
    made = registration(planned, group)
    show_endpoints.registration(planned, made)
    if dry_run:
        show_endpoints.print_requests(made.in_order())
        return
    show_endpoints.registered(operations.register(planned, made), made, operations.region)


@app.command("list")
def list_command(region: Region = None, profile: Profile = None, as_json: Json = False) -> None:
    """List the kit's endpoints in a region, with hours and price."""
    operations = _operations(None, region, profile)
    show_endpoints.listed(operations.listed(), operations.region, as_json)


@app.command()
def ask(
    endpoint: Annotated[list[str] | None, _ENDPOINT] = None,
    *,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What to ask.")],
    raw: Annotated[bool, typer.Option("--raw", help="TEXT is the whole prompt; no chat template is applied.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Print the endpoint's greedy answer as it arrives."""
    name, operations, _ = _found(only(endpoint, "TEXT"), region, profile)
    for piece in operations.ask(name, text, max_tokens, raw=raw):
        show_endpoints.piece(piece)
    print()


@app.command()
def url(endpoint: Annotated[str | None, _ENDPOINT] = None, region: Region = None, profile: Profile = None) -> None:
    """Print base URL and a fresh token for OpenAI clients, for a shell's `eval`.

    The token is a secret. It expires after 12 hours, or earlier with temporary credentials.
    """
    name, operations, _ = _found(endpoint, region, profile)
    address, token = operations.url(name)
    print(f"export OPENAI_BASE_URL={address}\nexport OPENAI_API_KEY={token}")


@app.command()
def logs(
    endpoint: Annotated[str | None, _ENDPOINT] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Wait for more lines.")] = False,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Print the log of the endpoint's container from CloudWatch."""
    name, operations, _ = _found(endpoint, region, profile)
    for line in operations.logs(name, follow=follow):
        print(line, flush=follow)


@app.command()
def delete(
    endpoint: Annotated[str | None, _ENDPOINT] = None,
    keep_bundle: Annotated[bool, typer.Option("--keep-bundle", help="Keep the uploaded model in S3.")] = False,
    yes: Yes = False,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Delete the endpoint and all that costs money with it.

    Safe to run again after an interruption.
    """
    name, operations, run = _found(endpoint, region, profile)
    require_yes(f"Delete endpoint {name} in {operations.region}?", yes)
    with interruptible(_kept(name, f"hyperpod-ft deploy delete {endpoint or name}")):
        operations.delete(name, run, keep_bundle=keep_bundle)
    print(f"Endpoint {name} no longer costs money{', except its files in S3' * keep_bundle}.")


def _run(reference: str | None, overrides: list[str] | None) -> "Run":
    from hyperpod_ft.runs import references
    from hyperpod_ft.sagemaker.endpoint.deployment import with_settings

    return with_settings(references.find(reference), overrides or ())


def _found(
    reference: str | None, region: str | None, profile: str | None
) -> tuple[str, "EndpointOperations", "Run | None"]:
    """The endpoint that a name or a run means, and the operations in its region."""
    from hyperpod_ft.sagemaker.endpoint.deployment import endpoint_name, is_endpoint_name

    if reference and is_endpoint_name(reference) and not Path(reference).exists():
        return reference, _operations(None, region, profile), None
    run = _run(reference, None)
    return endpoint_name(run), _operations(run, region, profile), run


def _operations(run: "Run | None", region: str | None, profile: str | None) -> "EndpointOperations":
    from hyperpod_ft.sagemaker.endpoint.deployment import region_of
    from hyperpod_ft.sagemaker.endpoint.operations import EndpointOperations

    named = region_of(run.config) if run else None
    return EndpointOperations.of(region or named, profile, tables.progress)


def _kept(name: str, delete_command: str) -> str:
    return (
        f"what was created for {name} is kept and may cost money; run the command again to continue, or delete it:"
        f" {delete_command}"
    )
