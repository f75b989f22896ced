"""The operations of `hyperpod-ft deploy`: decide, send requests to AWS, wait, ask, compare, delete."""

import json
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any

from hyperpod_ft.aws.checks import capacity, images, role
from hyperpod_ft.aws.checks.account import looked_at
from hyperpod_ft.aws.s3 import trees
from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.errors import UserError
from hyperpod_ft.findings import Finding, error, refuse_errors, warning
from hyperpod_ft.launch.finished import TUNED
from hyperpod_ft.progress import PrintLine
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker.endpoint import invoking, waiting
from hyperpod_ft.sagemaker.endpoint.bundle import small_files_in_store
from hyperpod_ft.sagemaker.endpoint.creation import create
from hyperpod_ft.sagemaker.endpoint.deployment import Deployment, bundle_prefix, deployment, is_endpoint_name
from hyperpod_ft.sagemaker.endpoint.endpoint_request import Target
from hyperpod_ft.sagemaker.endpoint.endpoints import MODEL, Endpoint, Endpoints
from hyperpod_ft.sagemaker.endpoint.invoking import stream
from hyperpod_ft.sagemaker.endpoint.proof import Proof
from hyperpod_ft.sagemaker.endpoint.registry import Registration, register
from hyperpod_ft.sagemaker.endpoint.remove import remove
from hyperpod_ft.sagemaker.endpoint.waiting import EndpointWatch
from hyperpod_ft.sagemaker.section import store_of

_PRICES_REGION = "us-east-1"  # one of the few in which the Price List API is offered


@dataclass(frozen=True)
class ListedEndpoint:
    """An endpoint that the kit created. `price`: US dollars for an hour of one instance, None when unknown."""

    endpoint: Endpoint
    run: str
    price: float | None

    @property
    def hours(self) -> float:
        """Since its creation."""
        return (datetime.now(timezone.utc) - self.endpoint.created).total_seconds() / 3600

    @property
    def cost(self) -> float | None:
        """US dollars since its creation, as if it had always had the current number of instances."""
        return None if self.price is None else round(self.hours * self.price * self.endpoint.instances, 2)


@dataclass(frozen=True)
class EndpointOperations:
    """The operations on the endpoints of a region. Methods raise UserError; times are in seconds."""

    session: Session
    report: PrintLine

    @classmethod
    def of(cls, region: str | None, profile: str | None, report: PrintLine) -> "EndpointOperations":
        return cls(Session(region, profile), report)

    @property
    def region(self) -> str:
        with explained("endpoint"):
            return str(self.session.client("sagemaker").meta.region_name)

    def preview(self, run: Run) -> Deployment:
        """What `deploy` would create. Changes nothing in AWS; small files of a run in a store are fetched."""
        if names := small_files_in_store(run):
            store = store_of(run.config)
            assert store, "only a store has such files"
            trees.pull_named(self.session.client("s3"), store, run.paths.root, names)
        return deployment(run, self.region)

    def check(self, planned: Deployment) -> None:
        """Say what could not be checked in the account. Raises UserError for what AWS would refuse."""
        refuse_errors(_findings(planned, self.session), self.report)

    def price(self, instance_type: str) -> float | None:
        """US dollars for an hour of one instance, on demand, without discounts, taxes, storage and transfer.

        None when AWS's Price List gives none.
        """
        filters = {"regionCode": self.region, "instanceName": f"ml.{instance_type}"}
        wanted = [{"Type": "TERM_MATCH", "Field": key, "Value": value} for key, value in filters.items()]
        try:
            with explained("price"):
                client = Session(_PRICES_REGION, self.session.profile).client("pricing")
                pages = client.get_paginator("get_products").paginate(ServiceCode="AmazonSageMaker", Filters=wanted)
                return hosting_price(json.loads(text) for page in pages for text in page["PriceList"])
        except UserError:
            return None  # without permission or network, the commands say that the price is unknown

    def deploy(self, deployment: Deployment, *, keep: bool) -> Proof:
        """Create the endpoint, wait for it, and send it the run's prompts: see `create`. Safe to repeat."""
        name = deployment.target.name
        with self._explained(name):
            return create(deployment, self._watch(name), keep=keep)

    def register(self, planned: Deployment, made: Registration) -> str:
        """The ARN of the run's model in the Model Registry. Safe to repeat."""
        with explained(f"model package group {made.name}"):
            return register(self.session.client("sagemaker"), self.session.client("s3"), planned, made, self.report)

    def listed(self) -> list[ListedEndpoint]:
        """The endpoints of the region that the kit created, newest first."""
        with explained("endpoints"):
            found = [self._endpoints.find(name) for name in self._endpoints.all_names() if is_endpoint_name(name)]
            runs = [(one, self._endpoints.run_of(one.arn)) for one in found if one is not None]
        prices = {kind: self.price(kind) for kind in {one.instance_type for one, run in runs if run} - {""}}
        return [ListedEndpoint(one, run, prices.get(one.instance_type)) for one, run in runs if run]

    def ask(self, name: str, text: str, max_tokens: int, *, raw: bool) -> Iterator[str]:
        """Pieces of the greedy answer, as they come. `raw`: the text is the prompt, without the chat template."""
        with self._explained(name):
            self._endpoints.require(name)
            component = self._endpoints.name_of_component(name)
            models = self._endpoints.names(MODEL, name)
            variables = self._endpoints.container(models[0]).get("Environment", {}) if models else {}
            request: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0}
            request |= {"prompt": text} if raw else {"messages": [{"role": "user", "content": text}]}
            if any(key.startswith("SM_VLLM_") for key in variables):
                request["model"] = TUNED
            runtime = self.session.client("sagemaker-runtime")
            for event in stream(runtime, name, component, request):
                for choice in event.get("choices", []):
                    yield invoking.piece_of(choice)

    def url(self, name: str) -> tuple[str, str]:
        """Base URL and a fresh token for OpenAI clients."""
        with self._explained(name):
            self._endpoints.require(name)
            component = self._endpoints.name_of_component(name)
            runtime = self.session.client("sagemaker-runtime")
            address = invoking.base_url(runtime.meta.endpoint_url, name, component)
            return address, invoking.bearer_token(self.session.credentials(), self.region)

    def logs(self, name: str, *, follow: bool) -> Iterator[str]:
        """What the container printed."""
        with self._explained(name):
            if follow:
                self._endpoints.require(name)  # the log of one that is deleted has no more lines
            yield from waiting.lines(self.session.client("logs"), self._watch(name).log_group(), follow=follow)

    def delete(self, name: str, run: Run | None, *, keep_bundle: bool) -> None:
        """Delete the endpoint and all that was created for it. `run`: to find a bundle that no model names yet."""
        with self._explained(name):
            if not remove(self._watch(name), bundle_prefix(run) if run else None, keep_bundle=keep_bundle):
                raise UserError(
                    f"no endpoint {name} in {self.region}, and nothing that was created for one",
                    "`hyperpod-ft deploy list` shows those of a region; check --region",
                )

    @property
    def _endpoints(self) -> Endpoints:
        return Endpoints(self.session.client("sagemaker"), self.report)

    def _watch(self, name: str) -> EndpointWatch:
        return EndpointWatch(self.session, name, self.report)

    def _explained(self, name: str) -> AbstractContextManager[None]:
        return explained(f"endpoint {name}")


_TYPE, _ROLE, _IMAGE = "deploy.instance_type", "deploy.role", "deploy.image"


def _findings(planned: Deployment, session: Session) -> list[Finding]:
    """What AWS would refuse, as errors, before anything is uploaded; what could not be looked at, as warnings.

    Other endpoints use quotas too.
    """
    target = planned.target
    return [
        *looked_at(_TYPE, "its quota", partial(_quota, target, session)),
        *looked_at(_ROLE, "the role", partial(_role, target, session)),
        *looked_at(_IMAGE, "its image", partial(_image, planned, session)),
    ]


def _quota(target: Target, session: Session) -> list[Finding]:
    limits = capacity.limits_of(session.client("service-quotas"), "sagemaker")
    name, needed = f"ml.{target.settings.instance_type} for endpoint usage", target.settings.instances
    if name not in limits:
        return [warning(_TYPE, *capacity.not_listed(name))]
    if needed <= limits[name]["Value"]:
        return []
    return [error(_TYPE, *capacity.shortfall(target.region, limits[name], needed, 0))]


def _role(target: Target, session: Session) -> list[Finding]:
    account_id = session.client("sts").get_caller_identity()["Account"]
    return role.assumable(session.client("iam"), target.role, account_id, _ROLE)


def _image(planned: Deployment, session: Session) -> list[Finding]:
    uri = planned.requests.model["PrimaryContainer"]["Image"]
    return images.missing(session.client("ecr"), planned.target.region, [uri], _IMAGE)


def hosting_price(products: Iterable[dict[str, Any]]) -> float | None:
    """The hourly price among an instance type's products: training, notebooks and hosting have one each."""
    for product in products:
        attributes = product["product"]["attributes"]
        names = (attributes.get("component", ""), attributes.get("platoinstancetype", ""))
        if "Hosting" not in names and "-Host:" not in attributes.get("usagetype", ""):
            continue
        for term in product.get("terms", {}).get("OnDemand", {}).values():
            for dimension in term["priceDimensions"].values():
                price = float(dimension["pricePerUnit"].get("USD", 0))
                if price > 0:
                    return price
    return None
