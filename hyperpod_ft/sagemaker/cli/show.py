"""How `hyperpod-ft deploy` prints."""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from hyperpod_ft.cli.output.tables import clip, console, print_json, table
from hyperpod_ft.errors import printable
from hyperpod_ft.progress import format_bytes

if TYPE_CHECKING:
    from hyperpod_ft.sagemaker.endpoint.deployment import Deployment
    from hyperpod_ft.sagemaker.endpoint.operations import ListedEndpoint
    from hyperpod_ft.sagemaker.endpoint.proof import Proof
    from hyperpod_ft.sagemaker.endpoint.registry import Registration

PRICES_PAGE = "https://aws.amazon.com/sagemaker/ai/pricing/"
_DIFFERENCES = 3  # answers that are shown


def piece(text: str) -> None:
    print(printable(text, keep="\n\t"), end="", flush=True)


def preview(deployment: "Deployment", price: float | None) -> None:
    """What will be made, how it fits, and what it costs."""
    target, bundle = deployment.target, deployment.target.bundle
    settings, fit = target.settings, target.fit
    print(f"Endpoint {target.name} in {target.region}: {settings.instances} x ml.{settings.instance_type}")
    print(f"Model: {settings.model}, {format_bytes(bundle.nbytes)}, {_source(deployment)}")
    print(f"Image: {deployment.requests.model['PrimaryContainer']['Image']}")
    print(f"Fit: tensor_parallel {fit.tensor_parallel}; {fit.arithmetic()}")
    if fit.longest_requests is not None:
        print(f"KV cache: {fit.longest_requests:,} requests of {fit.max_length:,} tokens at once")
    if not bundle.chat:
        print("No chat template: the endpoint answers completions, not chats")
    unknown = f"; AWS's Price List gave none (it needs pricing:GetProducts): {PRICES_PAGE}" if price is None else ""
    print(f"Price: {_price(price, settings.instances)}{unknown}")
    if settings.scale_to_zero:
        print("It scales to zero when there are no requests; until then, and while it answers, it costs that much")


def _source(deployment: "Deployment") -> str:
    stored = deployment.target.bundle.stored
    if stored is not None:
        return f"{'read' if deployment.target.url == stored else 'copied'} from the run's store, {stored}"
    return f"uploaded from {deployment.run.paths.directory}"


def requests(deployment: "Deployment") -> None:
    """The files and the requests of a dry run."""
    from hyperpod_ft.sagemaker.endpoint.bundle import CODE

    bundle, url = deployment.target.bundle, deployment.target.url
    for part in bundle.parts:
        below = "/".join(filter(None, (url, part.prefix)))
        for file in part.files:
            print(f"upload {below}/{file.relative_to(part.root).as_posix()}  {format_bytes(file.stat().st_size)}")
    if bundle.code:
        print(f"upload {url}/{CODE}  the kit's code")
    print_requests(deployment.requests.in_order())


def print_requests(in_order: Iterable[tuple[str, object]]) -> None:
    for operation, request in in_order:
        print(f"{operation} {json.dumps(request, indent=2)}")


def deployed(deployment: "Deployment", proof: "Proof") -> int:
    """The proof and the next commands; the exit status."""
    name = deployment.target.name
    print(proof.summary())
    for one in proof.different[:_DIFFERENCES]:
        print(f"  prompt   {clip(one.recorded.prompt)}")
        print(f"  recorded {clip(one.recorded.tuned)}")
        print(f"  endpoint {clip(one.answer)}")
    print(f"All answers: {deployment.run.paths.endpoint_proof}")
    print(f"Ask it:    hyperpod-ft deploy ask {name} 'TEXT'")
    print(f'OpenAI:    eval "$(hyperpod-ft deploy url {name})"')
    print(f"Delete it: {deployment.delete_command}   (it costs money until then)")
    if proof.holds:
        return 0
    print(f"error: endpoint {name}: does not answer like the tuned model; see its answers and log", file=sys.stderr)
    return 1


def registration(deployment: "Deployment", made: "Registration") -> None:
    """What will be registered, and what it costs."""
    print(f"A version of model package group {made.name} in {deployment.target.region}")
    print(f"Costs: S3 bills its copy of the model, {format_bytes(deployment.target.bundle.nbytes)}, in {made.files}/")


def registered(arn: str, made: "Registration", region: str) -> None:
    print(f"Registered: {arn}")
    command = f"aws sagemaker --region {region}"
    print(f"Approve it: {command} update-model-package --model-approval-status Approved --model-package-arn {arn}")
    print(f"Delete it:  {command} delete-model-package --model-package-name {arn}; aws s3 rm --recursive {made.files}/")


def listed(found: Sequence["ListedEndpoint"], region: str, as_json: bool) -> None:
    if as_json:
        print_json(
            [
                asdict(one.endpoint)
                | {"created": one.endpoint.created.isoformat(), "run": one.run, "hours": round(one.hours, 2)}
                | {"price_per_hour": one.price, "cost": one.cost}
                for one in found
            ]
        )
        return
    if not found:
        print(f"no endpoints of runs in {region}")
        return
    shown = table("endpoint", "state", "instances", "hours", "price", "so far", "run")
    for one in found:
        instances = f"{one.endpoint.instances} x ml.{one.endpoint.instance_type}"
        shown.add_row(
            one.endpoint.name,
            one.endpoint.status,
            instances,
            f"{one.hours:.1f}",
            _price(one.price, one.endpoint.instances),
            "unknown" if one.cost is None else f"about ${one.cost:,.2f}",
            one.run,
        )
    console().print(shown)
    print(
        "Hours: since creation, at the current number of instances. Each costs money until deleted:"
        " hyperpod-ft deploy delete NAME"
    )


def _price(price: float | None, instances: int) -> str:
    if price is None:
        return "unknown"
    return f"${price * instances:,.2f} an hour"
