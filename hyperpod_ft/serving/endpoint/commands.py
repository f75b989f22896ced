"""The operations of `hyperpod-ft deploy`: decide, send requests to AWS, wait, ask, compare, delete."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from hyperpod_ft import publish
from hyperpod_ft.aws.s3 import trees
from hyperpod_ft.aws.s3.location import Location
from hyperpod_ft.aws.session import Session, explained
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import format_bytes
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.serving.endpoint import bearer_token, endpoint_logs, scaling
from hyperpod_ft.serving.endpoint.bundle import small_files_in_store
from hyperpod_ft.serving.endpoint.deployment import (
    Deployment,
    bundle_prefix,
    deployment,
    is_endpoint_name,
)
from hyperpod_ft.serving.endpoint.endpoint_request import TUNED, component_name, model_name, startup_seconds
from hyperpod_ft.serving.endpoint.endpoints import DELETING, FAILED, Endpoint, Endpoints, require
from hyperpod_ft.serving.endpoint.invoking import invoke, stream
from hyperpod_ft.serving.endpoint.price import price_per_hour
from hyperpod_ft.serving.endpoint.proof import Asked, Proof, Question, completion_request, completion_text, questions
from hyperpod_ft.serving.endpoint.remove import remove
from hyperpod_ft.serving.endpoint.waiting import POLL_SECONDS, EndpointFailedError, Watch
from hyperpod_ft.terminal import printable

Say = Callable[[str], None]
_POLL_VARIABLE = "HYPERPOD_FT_POLL_SECONDS"  # for tests, whose stand-in for AWS answers at once
_START_SECONDS = 1800.0  # beside the container's own time: instances, the image, the model
_LOG_LINES = 60  # of a container that failed: its end holds the error
_QUESTIONS_AT_ONCE = 8
_QUOTA = "request a higher quota of this instance type `for endpoint usage` in Service Quotas, or choose another type"


@dataclass(frozen=True)
class Listed:
    """An endpoint that the kit made. `price`: US dollars for an hour of one instance, None when unknown."""

    endpoint: Endpoint
    run: str
    price: float | None

    @property
    def hours(self) -> float:
        """Since its creation."""
        return (datetime.now(timezone.utc) - self.endpoint.created).total_seconds() / 3600

    @property
    def cost(self) -> float | None:
        """US dollars since its creation, as if it always had the instances of now."""
        return None if self.price is None else round(self.hours * self.price * self.endpoint.instances, 2)


@dataclass(frozen=True)
class EndpointCommands:
    """The operations on the endpoints of a region. Methods raise UserError; times are in seconds."""

    session: Session
    say: Say
    poll_seconds: float = POLL_SECONDS

    @classmethod
    def of(cls, region: str | None, profile: str | None, say: Say) -> "EndpointCommands":
        session = Session(region, profile or os.environ.get("AWS_PROFILE"))
        return cls(session, say, float(os.environ.get(_POLL_VARIABLE, POLL_SECONDS)))

    @property
    def region(self) -> str:
        with explained("endpoint"):
            return str(self.session.client("sagemaker").meta.region_name)

    def preview(self, run: Run) -> Deployment:
        """What `deploy` would make. Changes nothing in AWS; small files of a run in a store are fetched from there."""
        if names := small_files_in_store(run):
            assert run.config.sagemaker and run.config.sagemaker.store, "only then there are such files"
            trees.pull_named(self._s3, run.config.sagemaker.store, run.root, names)
        return deployment(run, self.region)

    def price(self, instance_type: str) -> float | None:
        return price_per_hour(self.session, instance_type, self.region)

    def deploy(self, run: Run, *, keep: bool) -> Proof | None:
        """Make the endpoint, wait for it, and ask it the run's prompts. None when the run recorded no answers.

        Safe to repeat after an interruption. When its container fails, everything is deleted again unless `keep`.
        """
        planned = self.preview(run)
        name = planned.target.name
        with self._explained(name):
            self._check_bucket(planned)
            self._create(planned)
            watch = self._watch(name, scales=planned.requests.component is not None)
            try:
                self._wait(watch, planned)
            except EndpointFailedError as error:
                self._give_up(watch, run, error, keep=keep)
            return self._prove(planned)

    def _check_bucket(self, planned: Deployment) -> None:
        """Raises UserError when the files' bucket is elsewhere: SageMaker would notice once its instances run."""
        bucket = Location.of(planned.target.bundle).bucket
        with explained(f"bucket {bucket}", {"404": "correct deploy.store, or create the bucket"}):
            region = self._s3.head_bucket(Bucket=bucket).get("BucketRegion", planned.target.region)
        if region != planned.target.region:
            raise UserError(
                f"deploy.store: bucket {bucket} is in {region}, the endpoint in {planned.target.region}",
                "choose a bucket and an endpoint in one region",
            )

    def _create(self, planned: Deployment) -> None:
        endpoints, name, requests = self._endpoints, planned.target.name, planned.requests
        existing = endpoints.find(name)
        if existing is not None and existing.status in (FAILED, DELETING):
            self.say(f"endpoint {name}: {existing.status} already; it is deleted before it is made again")
            remove(self._watch(name), self.session.client, keep_bundle=True)
            existing = None
        if existing is not None:
            if existing.config != requests.config["EndpointConfigName"]:
                raise UserError(
                    f"endpoint {name} exists with other settings, on {existing.instance_type or 'another type'}",
                    f"hyperpod-ft deploy delete {name}, then deploy again",
                )
            self.say(f"endpoint {name} exists already")
            return
        if planned.bundle.parts:
            self.say(f"uploading {format_bytes(planned.bundle.nbytes)} to {planned.target.bundle}/")
        for part in planned.bundle.parts:
            url = "/".join(filter(None, (planned.target.bundle, part.prefix)))
            trees.push(self._s3, url, part.root, part.files, "upload")
        endpoints.create_model(requests.model)
        endpoints.create_config(requests.config)
        endpoints.create_endpoint(requests.endpoint)

    def _wait(self, watch: Watch, planned: Deployment) -> None:
        seconds = _START_SECONDS + startup_seconds(planned.target.settings)
        watch.until_endpoint(seconds)
        if planned.requests.component is not None:
            self._endpoints.create_component(planned.requests.component)
            watch.until_component(seconds)
            scaling.apply(
                self.session.client("application-autoscaling"),
                self.session.client("cloudwatch"),
                component_name(watch.name),
                planned.target.settings.instances,
            )

    def _give_up(self, watch: Watch, run: Run, error: EndpointFailedError, *, keep: bool) -> None:
        """Show why the container failed, keep its log with the run, delete the endpoint. Always raises UserError."""
        log = run.logs / "endpoint.log"
        try:
            with explained("the container's log"):
                lines = list(endpoint_logs.lines(self.session.client("logs"), watch.log_group(), follow=False))
                publish.write_text(log, "".join(f"{line}\n" for line in lines))
                self.say(f"--- the container's log, last {min(len(lines), _LOG_LINES)} of {len(lines)} lines ({log})")
                for line in lines[-_LOG_LINES:]:
                    self.say(printable(line, keep="\t"))
                self.say("---")
        except UserError as unreadable:
            self.say(str(unreadable))
        if keep:
            raise UserError(
                f"{error.problem}; it is kept, and may cost money", f"hyperpod-ft deploy delete {watch.name}"
            ) from error
        remove(watch, self.session.client, _bundles(run))
        raise UserError(
            f"{error.problem}; everything made for it is deleted", "correct what its log shows, then deploy again"
        ) from error

    def _prove(self, planned: Deployment) -> Proof | None:
        """Ask the endpoint the run's own prompts; the result is kept in the run directory."""
        run, target = planned.run, planned.target
        if not run.samples_path.is_file():
            return None
        asked: list[Question] = questions(run.samples_path)
        component = component_name(target.name) if planned.requests.component else None
        client = self.session.client("sagemaker-runtime", connections=_QUESTIONS_AT_ONCE)
        served = model_name(target.settings)

        def ask(question: Question) -> Asked:
            request = completion_request(question, served, run.config.generate.max_new_tokens)
            return Asked(question, completion_text(invoke(client, target.name, component, request)))

        self.say(f"asking {len(asked)} prompts of {run.samples_path.name}")
        with ThreadPoolExecutor(_QUESTIONS_AT_ONCE) as pool:
            proof = Proof(tuple(pool.map(ask, asked)))
        publish.write_json(
            run.endpoint_proof,
            {
                "endpoint": target.name,
                "region": target.region,
                "instance_type": target.settings.instance_type,
                "image": planned.requests.model["PrimaryContainer"]["Image"],
                "asked_at": utc_now(),
                **proof.as_dict(),
            },
        )
        return proof

    def listed(self) -> list[Listed]:
        """The endpoints of the region that the kit made, newest first."""
        with explained("endpoints"):
            found = [self._endpoints.find(name) for name in self._endpoints.all_names() if is_endpoint_name(name)]
            runs = [(one, self._endpoints.run_of(one)) for one in found if one is not None]
        prices = {kind: self.price(kind) for kind in {one.instance_type for one, run in runs if run} - {""}}
        return [Listed(one, run, prices.get(one.instance_type)) for one, run in runs if run]

    def ask(self, name: str, text: str, max_tokens: int, *, raw: bool) -> Iterator[str]:
        """Pieces of the greedy answer, as they come. `raw`: the text is the prompt, without the chat template."""
        with self._explained(name):
            require(self._endpoints, name)
            component = self._endpoints.component(name)
            models = self._endpoints.models(name)
            variables = self._endpoints.server_variables(models[0]) if models else {}
            request: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0}
            request |= {"prompt": text} if raw else {"messages": [{"role": "user", "content": text}]}
            if any(key.startswith("SM_VLLM_") for key in variables):
                request["model"] = TUNED
            runtime = self.session.client("sagemaker-runtime")
            for event in stream(runtime, name, component.name if component else None, request):
                for choice in event.get("choices", []):
                    yield (choice.get("text") if raw else choice.get("delta", {}).get("content")) or ""

    def url(self, name: str) -> tuple[str, str]:
        """Base URL and a fresh token for OpenAI clients."""
        with self._explained(name):
            require(self._endpoints, name)
            component = self._endpoints.component(name)
            runtime = self.session.client("sagemaker-runtime")
            address = bearer_token.base_url(runtime.meta.endpoint_url, name, component.name if component else None)
            return address, bearer_token.bearer_token(self.session.credentials(), self.region)

    def logs(self, name: str, *, follow: bool) -> Iterator[str]:
        """What the container printed."""
        with self._explained(name):
            component = self._endpoints.component(name)
            group = endpoint_logs.log_group(name, component.name if component else None)
            yield from endpoint_logs.lines(self.session.client("logs"), group, follow=follow)

    def delete(self, name: str, run: Run | None, *, keep_bundle: bool) -> None:
        """Delete the endpoint and all that was made for it. `run`: whose, to find a bundle that no model names yet."""
        with self._explained(name):
            if not remove(self._watch(name), self.session.client, _bundles(run), keep_bundle=keep_bundle):
                raise UserError(
                    f"no endpoint {name} in {self.region}, and nothing that was made for one",
                    "`hyperpod-ft deploy list` shows those of a region; check --region",
                )

    @property
    def _s3(self) -> Any:
        return self.session.client("s3", connections=trees.CONNECTIONS)

    @property
    def _endpoints(self) -> Endpoints:
        return Endpoints(self.session.client("sagemaker"), self.say)

    def _watch(self, name: str, *, scales: bool = False) -> Watch:
        return Watch(self._endpoints, self.session.client("logs"), name, scales, self.say, self.poll_seconds)

    def _explained(self, name: str) -> AbstractContextManager[None]:
        return explained(f"endpoint {name}", {"ResourceLimitExceeded": _QUOTA})


def _bundles(run: Run | None) -> list[str]:
    """Where a run's bundles are, one that no model names yet included."""
    prefix = bundle_prefix(run) if run is not None else None
    return [prefix] if prefix else []
