"""Creates a run's endpoint, waits for it, proves it. Every step finds what an interrupted command has created."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hyperpod_ft import publish
from hyperpod_ft.aws.s3 import buckets, trees
from hyperpod_ft.aws.s3.objects import Location, explained_s3
from hyperpod_ft.aws.session import explained
from hyperpod_ft.errors import UserError, printable
from hyperpod_ft.launch import snapshot
from hyperpod_ft.progress import PrintLine, format_bytes
from hyperpod_ft.runs import chain
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.results.samples import RecordedAnswers
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker.endpoint import scaling, waiting
from hyperpod_ft.sagemaker.endpoint.bundle import CODE, Bundle
from hyperpod_ft.sagemaker.endpoint.deployment import Deployment, bundle_prefix
from hyperpod_ft.sagemaker.endpoint.endpoint_request import component_name, model_name, startup_seconds
from hyperpod_ft.sagemaker.endpoint.endpoints import COMPONENT, CONFIG, DELETING, ENDPOINT, FAILED, MODEL
from hyperpod_ft.sagemaker.endpoint.invoking import invoke
from hyperpod_ft.sagemaker.endpoint.proof import ComparedAnswer, Proof, completion_request, completion_text
from hyperpod_ft.sagemaker.endpoint.remove import remove
from hyperpod_ft.sagemaker.endpoint.waiting import EndpointFailedError, EndpointWatch
from hyperpod_ft.sagemaker.section import store_url

_START_SECONDS = 1800.0  # for instances, image and model, before the container's own startup time
_LOG_LINES = 60  # of a container that failed: its end holds the error
_QUESTIONS_AT_ONCE = 8
_QUOTA = "request a higher quota of this instance type `for endpoint usage` in Service Quotas, or choose another type"


def create(deployment: Deployment, watch: EndpointWatch, *, keep: bool) -> Proof:
    """Create a planned endpoint, wait for it and compare its answers with the recorded ones.

    Raises UserError if it cannot be created. If its container fails, everything is deleted first, unless `keep`;
    after any other error, what was created is kept, and the error says so.
    """
    check_bucket(watch.session.client("s3"), deployment.target.url, deployment.target.region)
    exists = _exists(deployment, watch)
    with _kept(deployment):
        if not exists:
            _create(deployment, watch)
        try:
            _wait(deployment, watch)
            return _prove(deployment, watch)
        except EndpointFailedError as error:
            _show_log(deployment.run, watch)
            if keep:
                raise
            remove(watch, bundle_prefix(deployment.run))
            failed = error
    raise UserError(
        f"{failed.problem}; everything created for it has been deleted", "fix what its log shows, then deploy again"
    ) from failed


@contextmanager
def _kept(deployment: Deployment) -> Iterator[None]:
    """Adds to every error that what was created is kept, and how to delete it: instances are billed by the hour."""
    try:
        with explained(f"endpoint {deployment.target.name}", {"ResourceLimitExceeded": _QUOTA}):
            yield
    except UserError as error:
        delete = f"to delete it: {deployment.delete_command}"
        raise UserError(
            f"{error.problem}; what was created is kept and may cost money",
            f"{error.remedy}; {delete}" if error.remedy else delete,
        ) from error


def _exists(deployment: Deployment, watch: EndpointWatch) -> bool:
    """Whether the endpoint is there, as planned. One that has failed is deleted: it cannot be repaired."""
    name, report = watch.name, watch.report
    endpoint, component = watch.endpoints.find(name), watch.endpoints.component(name)
    if endpoint is None:
        return False
    if endpoint.status in (FAILED, DELETING) or (component is not None and component.status in (FAILED, DELETING)):
        report(f"endpoint {name} has failed or is being deleted; it will be created again once it is gone")
        remove(watch, keep_bundle=True)
        return False
    if endpoint.config != deployment.requests.config["EndpointConfigName"]:
        raise UserError(
            f"endpoint {name} exists with other settings or an earlier model of the run,"
            f" on {endpoint.instance_type or 'another type'}",
            f"hyperpod-ft deploy delete {name}, then deploy again",
        )
    report(f"endpoint {name} already exists")
    return True


def _create(deployment: Deployment, watch: EndpointWatch) -> None:
    target, requests = deployment.target, deployment.requests
    place(watch.session.client("s3"), deployment.run, target.bundle, target.url, watch.report)
    watch.endpoints.create(MODEL, requests.model)
    watch.endpoints.create(CONFIG, requests.config)
    watch.endpoints.create(ENDPOINT, requests.endpoint)


def _wait(deployment: Deployment, watch: EndpointWatch) -> None:
    target, component = deployment.target, deployment.requests.component
    seconds = _START_SECONDS + startup_seconds(target.settings)
    watch.until_in_service(ENDPOINT, watch.endpoints.find, seconds)
    if component is not None:
        watch.endpoints.create(COMPONENT, component)
        watch.until_in_service(COMPONENT, watch.endpoints.component, seconds)
        scaling.apply(
            watch.session.client("application-autoscaling"),
            watch.session.client("cloudwatch"),
            component_name(target.name),
            target.settings.instances,
        )


def _show_log(run: Run, watch: EndpointWatch) -> None:
    """Print the end of the container's log, and keep all of it with the run; or say why it cannot be read."""
    path = run.paths.logs / "endpoint.log"
    try:
        with explained("the container's log"):
            lines = list(waiting.lines(watch.session.client("logs"), watch.log_group(), follow=False))
    except UserError as error:
        watch.report(str(error))
        return
    publish.write_text(path, "".join(f"{line}\n" for line in lines))
    watch.report(f"--- the container's log, last {min(len(lines), _LOG_LINES)} of {len(lines)} lines ({path})")
    for line in lines[-_LOG_LINES:]:
        watch.report(printable(line, keep="\t"))
    watch.report("---")


def _prove(deployment: Deployment, watch: EndpointWatch) -> Proof:
    """Ask the endpoint the run's own prompts; the result is kept in the run directory."""
    run, target, recorded = deployment.run, deployment.target, deployment.recorded
    component = component_name(target.name) if deployment.requests.component else None
    client = watch.session.client("sagemaker-runtime")
    served = model_name(target.settings)

    def ask(sample: RecordedAnswers) -> ComparedAnswer:
        request = completion_request(sample, served, run.config.generate.max_new_tokens)
        return ComparedAnswer(sample, completion_text(invoke(client, target.name, component, request)))

    # the kit's server answers one on each GPU, and SageMaker's patience includes the wait for a GPU
    at_once = (target.fit.instance.ranks or 1) if target.bundle.code else _QUESTIONS_AT_ONCE
    watch.report(f"asking {len(recorded)} prompts of {run.paths.samples_path.name}, {at_once} at a time")
    with ThreadPoolExecutor(at_once) as pool:
        proof = Proof(tuple(pool.map(ask, recorded)))
    about = {
        "endpoint": target.name,
        "region": target.region,
        "instance_type": target.settings.instance_type,
        "image": deployment.requests.model["PrimaryContainer"]["Image"],
        "asked_at": utc_now(),
        "model": chain.model_digest(run.journal),
    }
    publish.write_json(run.paths.endpoint_proof, about | proof.as_dict())
    return proof


def check_bucket(s3: Any, url: str, wanted: str) -> None:
    """Raises UserError if the files' bucket is in another region: SageMaker would fail only once instances run."""
    bucket = Location.of(url).bucket
    with explained(f"bucket {bucket}", {"404": "correct deploy.store, or create the bucket"}):
        region = buckets.region(s3, bucket)
    if region and region != wanted:
        raise UserError(
            f"deploy.store: bucket {bucket} is in {region}, the endpoint in {wanted}",
            "choose a bucket and an endpoint in one region",
        )


def place(s3: Any, run: Run, bundle: Bundle, url: str, report: PrintLine) -> None:
    """Upload the files that are here, where they are not there yet; copy a model that only the run's store has."""
    if bundle.parts:
        report(f"uploading {format_bytes(bundle.nbytes)} to {url}/")
    for part in bundle.parts:
        trees.push(s3, "/".join(filter(None, (url, part.prefix))), part.root, part.files, "upload")
    if bundle.stored and url != bundle.stored:
        _copy(s3, run, url)
    if bundle.code:
        with TemporaryDirectory() as directory:
            file = Path(directory) / CODE
            snapshot.archive(file)
            trees.push(s3, url, file.parent, [file], "upload")


def _copy(s3: Any, run: Run, url: str) -> None:
    """From the run's store, within S3: what is not there yet. `url` is named after the content, so sizes tell."""
    record, to = run.journal.record(run.plan.model_stage), Location.of(url)
    assert record is not None, "a stage that is done has one"
    there = {entry.name: entry.size for entry in trees.listing(s3, url)}
    with explained_s3(url, "write"):
        for output in record.outputs:
            path = run.paths.root / output.path
            name = path.relative_to(run.paths.tuned_model).as_posix()
            if there.get(name) != output.size:
                source = Location.of(store_url(run, path))
                s3.copy({"Bucket": source.bucket, "Key": source.prefix}, to.bucket, to.key(name))
