"""Deletes an endpoint and everything that was created for it. What no longer exists is skipped."""

from contextlib import suppress
from typing import Any

from hyperpod_ft.aws.s3 import objects, trees
from hyperpod_ft.aws.session import error_code, explained
from hyperpod_ft.errors import UserError
from hyperpod_ft.sagemaker.endpoint import scaling, waiting
from hyperpod_ft.sagemaker.endpoint.endpoint_request import component_name
from hyperpod_ft.sagemaker.endpoint.endpoints import COMPONENT, CONFIG, ENDPOINT, MODEL, Endpoints
from hyperpod_ft.sagemaker.endpoint.waiting import EndpointWatch
from hyperpod_ft.sagemaker.section import RUN_TAG


def remove(watch: EndpointWatch, bundle: str | None = None, *, keep_bundle: bool = False) -> bool:
    """Delete what an endpoint has: instances first, since they cost most; the models last, which name the bundles.

    `bundle`: an S3 prefix in addition to those that the models name. Returns whether there was anything. Raises
    UserError, before anything is deleted, for an endpoint that the kit did not make.
    """
    endpoints, name, client = watch.endpoints, watch.name, watch.session.client
    _require_tags(endpoints, name)
    models, configs = endpoints.names(MODEL, name), endpoints.names(CONFIG, name)
    endpoint = endpoints.find(name)
    component = endpoints.component(name)
    if component is not None:
        scaling.remove(client("application-autoscaling"), client("cloudwatch"), component.name)
        watch.until_gone(COMPONENT, endpoints.component)
        watch.report(f"deleted inference component {component.name}")
    if endpoint is not None:
        watch.until_gone(ENDPOINT, endpoints.find)
        watch.report(f"deleted endpoint {name}")
    for config in configs:
        endpoints.delete(CONFIG, config)
        watch.report(f"deleted configuration {config}")
    removed = 0
    if not keep_bundle:
        for url in sorted({bundle or "", *map(endpoints.bundle, models)} - {""}):
            removed += _remove_bundle(watch, client("s3"), url)
    found = bool(models or configs or endpoint or component or removed)
    if found:
        _remove_logs(watch, client("logs"))
    for model in models:
        endpoints.delete(MODEL, model)
        watch.report(f"deleted model {model}")
    return found


def _require_tags(endpoints: Endpoints, name: str) -> None:
    """Many names end like those that the kit gives, with twelve hexadecimal digits; only the tag says whose it is."""
    for kind, find in ((ENDPOINT, endpoints.find), (COMPONENT, endpoints.component)):
        found = find(name)
        if found is not None and not endpoints.run_of(found.arn) and find(name) is not None:
            raise UserError(
                f"{kind.words} {found.name}: has no tag {RUN_TAG}, so hyperpod-ft did not make it; nothing is deleted",
                "`hyperpod-ft deploy list` shows the endpoints that can be deleted",
            )


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
    """CloudWatch bills for a log as long as it is stored."""
    groups = (waiting.log_group(watch.name), waiting.log_group(watch.name, component_name(watch.name)))
    try:
        with explained("its log", {"AccessDeniedException": "allow logs:DeleteLogGroup, or delete it yourself"}):
            for group in groups:
                with suppress(logs.exceptions.ResourceNotFoundException):
                    logs.delete_log_group(logGroupName=group)
    except UserError as error:
        watch.report(f"{groups[0]} was not deleted, and AWS charges for what it stores: {error}")
