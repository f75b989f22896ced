"""Deletes an endpoint and everything that was created for it. What no longer exists is skipped."""

from collections.abc import Iterable
from typing import Any

from hyperpod_ft.aws.s3 import objects, trees
from hyperpod_ft.aws.session import error_code, explained
from hyperpod_ft.errors import UserError
from hyperpod_ft.sagemaker.endpoint import scaling, waiting
from hyperpod_ft.sagemaker.endpoint.endpoint_request import component_name
from hyperpod_ft.sagemaker.endpoint.endpoints import DELETING, Endpoints
from hyperpod_ft.sagemaker.endpoint.waiting import EndpointWatch
from hyperpod_ft.sagemaker.section import RUN_TAG

DEADLINE_SECONDS = 1800.0


def remove(watch: EndpointWatch, clients: Any, bundles: Iterable[str] = (), *, keep_bundle: bool = False) -> bool:
    """Delete what an endpoint has: instances first, since they cost most; the models last, which name the bundles.

    `clients`: boto3's client of a service. `bundles`: S3 prefixes in addition to those that the models name. Returns
    whether there was anything. Raises UserError, before anything is deleted, for an endpoint that the kit did not make.
    """
    endpoints, name = watch.endpoints, watch.name
    _require_tags(endpoints, name)
    models, configs = endpoints.models(name), endpoints.configs(name)
    endpoint = endpoints.find(name)
    component = endpoints.component(name)
    if component is not None:
        scaling.remove(clients("application-autoscaling"), clients("cloudwatch"), component.name)
        watch.until_gone(lambda: _delete_component(watch), "inference component", DEADLINE_SECONDS)
        watch.report(f"deleted inference component {component.name}")
    if endpoint is not None:
        watch.until_gone(lambda: _delete_endpoint(watch), "endpoint", DEADLINE_SECONDS)
        watch.report(f"deleted endpoint {name}")
    for config in configs:
        endpoints.delete_config(config)
    removed = 0
    if not keep_bundle:
        for url in sorted({*bundles, *(endpoints.bundle(model) for model in models)} - {""}):
            removed += _remove_bundle(watch, clients("s3"), url)
    found = bool(models or configs or endpoint or component or removed)
    if found:
        _remove_logs(watch, clients("logs"))
    for model in models:
        endpoints.delete_model(model)
    return found


def _require_tags(endpoints: Endpoints, name: str) -> None:
    """Many names end like those that the kit gives, with twelve hexadecimal digits; only the tag says whose it is."""
    for kind, find in (("endpoint", endpoints.find), ("inference component", endpoints.component)):
        found = find(name)
        if found is not None and not endpoints.run_of(found.arn) and find(name) is not None:
            raise UserError(
                f"{kind} {found.name}: has no tag {RUN_TAG}, so hyperpod-ft did not make it; nothing is deleted",
                "`hyperpod-ft deploy list` shows the endpoints that can be deleted",
            )


def _delete_component(watch: EndpointWatch) -> bool:
    """Request the deletion if none is in progress; returns whether the component still exists."""
    found = watch.endpoints.component(watch.name)
    if found is not None and found.status != DELETING:
        watch.endpoints.delete_component(watch.name)
    return found is not None


def _delete_endpoint(watch: EndpointWatch) -> bool:
    """Request the deletion if none is in progress; returns whether the endpoint still exists."""
    found = watch.endpoints.find(watch.name)
    if found is not None and found.status != DELETING:
        watch.endpoints.delete_endpoint(watch.name)
    return found is not None


def _remove_bundle(watch: EndpointWatch, s3: Any, url: str) -> int:
    if f"/endpoints/{watch.name}/" not in url:
        watch.report(f"kept {url}: it is not a bundle of this endpoint")
        return 0
    names = _names(s3, url)
    objects.remove(s3, url, names)
    if left := _names(s3, url):
        raise UserError(f"{url}: {len(left)} objects cannot be deleted", "grant these credentials s3:DeleteObject")
    if names:
        watch.report(f"deleted {len(names)} objects at {url}")
    return len(names)


def _names(s3: Any, url: str) -> list[str]:
    """The files below a prefix; a bucket that no longer exists has none."""
    try:
        return [entry.name for entry in trees.listing(s3, url)]
    except UserError as error:
        if error_code(error.__cause__ or error) == "NoSuchBucket":
            return []
        raise


def _remove_logs(watch: EndpointWatch, logs: Any) -> None:
    groups = (waiting.log_group(watch.name), waiting.log_group(watch.name, component_name(watch.name)))
    try:
        with explained("its log", {"AccessDeniedException": "allow logs:DeleteLogGroup, or delete it yourself"}):
            for group in groups:
                waiting.delete(logs, group)
    except UserError as error:
        watch.report(f"{groups[0]} was not deleted, and AWS charges for what it stores: {error}")
