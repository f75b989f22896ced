"""What `hyperpod-ft deploy` creates for a run: settings, files, fit, requests and prompts, decided before it costs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hyperpod_ft.aws.checks.service_model import check_request
from hyperpod_ft.config import run_file, yaml_file
from hyperpod_ft.config.instances import ENDPOINT_INSTANCES
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.run_file import RUN_FILE
from hyperpod_ft.config.sections.sagemaker import Deploy
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.results.samples import RecordedAnswers, Samples
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths
from hyperpod_ft.sagemaker.endpoint.bundle import Bundle, bundle_of
from hyperpod_ft.sagemaker.endpoint.endpoint_request import Requests, Target, requests
from hyperpod_ft.sagemaker.endpoint.fit import fit
from hyperpod_ft.sagemaker.section import slug

_MAX_NAME_LENGTH = 54  # of 63: names of models, configurations and components add up to nine characters
_NAME = re.compile(r"[a-zA-Z0-9](?:-*[a-zA-Z0-9])*-[0-9a-f]{12}")


@dataclass(frozen=True)
class Deployment:
    """What `deploy` creates for a run: its target and requests."""

    run: Run
    target: Target
    requests: Requests
    recorded: tuple[RecordedAnswers, ...]  # with which the endpoint's are compared

    @property
    def delete_command(self) -> str:
        """Deletes all that was created. It names the run, which knows where files were uploaded if no model does."""
        return f"hyperpod-ft deploy delete {self.run.paths.directory} --region {self.target.region}"


def with_settings(run: Run, overrides: Sequence[str]) -> Run:
    """The run with other settings of section `deploy`, which is not part of its identity. Raises UserError."""
    if not overrides:
        return run
    values: dict[str, Any] = run.config.model_dump(mode="json")
    values["deploy"] = values["deploy"] or {}
    for text in overrides:
        if not text.startswith("deploy."):
            raise UserError(f"--set {text}: only keys of section deploy can be set here", "--set deploy.KEY=VALUE")
        yaml_file.override(RUN_FILE, values, text)
    return replace(run, config=run_file.validate(values, "--set"))


def deploy_section(config: RunConfig) -> Deploy:
    """Section `deploy` of the run. Raises UserError when it is missing."""
    section = config.deploy
    if section is None:
        raise UserError(
            f"{config.name}: the run file has no section deploy",
            "add it, or pass --set deploy.instance_type=g6.2xlarge --set deploy.store=s3://BUCKET/PREFIX"
            " --set deploy.role=ROLE_ARN",
        )
    return section


def endpoint_name(run: Run) -> str:
    """For example `dolly-llama-0123456789ab`: the run's name in SageMaker's characters, and its id."""
    run_id = run.plan.run_id
    return f"{slug(run.config, _MAX_NAME_LENGTH - len(run_id) - 1)}-{run_id}"


def is_endpoint_name(name: str) -> bool:
    """Whether a name has the form that `endpoint_name` gives."""
    return bool(_NAME.fullmatch(name)) and len(name) <= _MAX_NAME_LENGTH


def region_of(config: RunConfig) -> str | None:
    """The region that the run file names for its endpoint."""
    return _given(config, "region")


def bundle_prefix(run: Run, what: Literal["endpoints", "registry"] = "endpoints") -> str | None:
    """The S3 prefix of every bundle of the run's endpoint, or of its registered models, with a slash at its end.

    None without a store.
    """
    store = _given(run.config, "store")
    return f"{store.rstrip('/')}/{what}/{endpoint_name(run)}/" if store else None


def deployment(run: Run, region: str) -> Deployment:
    """Raises UserError when the model does not fit, could not be proved, or a request is not what AWS accepts."""
    settings = deploy_section(run.config)
    bundle = bundle_of(run, settings)
    role = _given(run.config, "role")
    if role is None:
        raise UserError("deploy.role: is not set", "set it to the ARN of the endpoint's execution role")
    found = fit(
        bundle.served,
        ENDPOINT_INSTANCES[settings.instance_type],
        _max_length(run.config, bundle),
        settings.max_concurrency,
    )
    target = Target(
        name=endpoint_name(run),
        run=run.paths.full_name,
        region=region,
        role=role,
        bundle=bundle,
        url=bundle.stored if bundle.stored and not bundle.code else _bundle_url(run, bundle),
        settings=settings,
        fit=found,
    )
    made = requests(target)
    for operation, request in made.in_order():
        for violation in check_request("sagemaker", operation, request):
            raise UserError(f"{operation}: {violation.path}: {violation.problem}", "correct section deploy")
    return Deployment(run, target, made, _recorded(run.paths))


def _recorded(paths: RunPaths) -> tuple[RecordedAnswers, ...]:
    """The answers to prompts that a container accepts: it refuses an empty one, by when instances are paid for."""
    if not paths.samples_path.is_file():
        raise UserError(
            f"{paths.samples_path}: is missing; the endpoint's answers are compared with it",
            f"stage generate writes it: hyperpod-ft resume {paths.directory}",
        )
    found = tuple(one for one in Samples.read(paths.samples_path).all_answers if one.prompt.strip())
    if not found:
        raise UserError(
            f"{paths.samples_path}: has no prompt, to compare the endpoint's answer with the recorded one",
            "set generate.prompts in the run file and submit it again: only stage generate runs",
        )
    return found


def _bundle_url(run: Run, bundle: Bundle) -> str:
    prefix = bundle_prefix(run)
    if prefix is None:
        raise UserError("deploy.store: is not set", "set it to s3://BUCKET/PREFIX, where the model is uploaded")
    return f"{prefix}{bundle.version}"


def _given(config: RunConfig, key: Literal["region", "role", "store"]) -> str | None:
    """A key of section `deploy`, or else of section `sagemaker`."""
    found = (getattr(section, key, None) for section in (config.deploy, config.sagemaker))
    return next((str(value) for value in found if value), None)


def _max_length(config: RunConfig, bundle: Bundle) -> int:
    settings = deploy_section(config)
    if settings.max_length is not None:
        return settings.max_length
    trained = config.dataset.max_length + config.generate.max_new_tokens
    return min(trained, bundle.served.positions or trained)
