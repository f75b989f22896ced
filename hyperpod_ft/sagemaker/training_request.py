"""A run and a group of its stages -> the request of CreateTrainingJob. Pure functions.

What the container needs to know before it can read the run's files is in the hyperparameters; everything else is in
those files. So is `cluster.environment`, except package index, proxy and certificates: Environment holds up to 512
characters a value, and DescribeTrainingJob shows them.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from hyperpod_ft.config.fields import time_limit_seconds
from hyperpod_ft.config.instances import CATALOGUE, Instance
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.interface import JobPreview
from hyperpod_ft.planning.engine_rules import rules_of
from hyperpod_ft.planning.pins import pins_file
from hyperpod_ft.planning.plan import StagePlan
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker.container.host import CODE, FSX, Hyperparameters
from hyperpod_ft.sagemaker.groups import StageGroup, groups
from hyperpod_ft.sagemaker.images import image
from hyperpod_ft.sagemaker.section import RUN_TAG, SAGEMAKER, sagemaker_section, store_of
from hyperpod_ft.shipped import PACKAGE

# Starts the program in the arguments. -I: nothing of the image's environment.
_ENTRYPOINT = ("python3", "-I", "-c", r"import sys; exec('\n'.join(sys.argv[1:]))")
_START = PACKAGE / "sagemaker" / "container" / "start.py"
MAX_SECONDS = 28 * 86400  # of a training job, and of its wait
_MIN_PENDING_SECONDS = 1800
_MAX_RETRIES = 30
# What pip and boto3 need before any script exports it
_OF_CONNECTIONS = re.compile(r"PIP_.*|.*_PROXY|AWS_CA_BUNDLE|REQUESTS_CA_BUNDLE|SSL_CERT_FILE", re.IGNORECASE)
_MAX_VALUE_LENGTH = 512
IMAGE = "sagemaker.image"
# CloudWatch metrics from the lines that training prints for each step (engines/metrics.py)
_METRICS = {
    "loss": r"^step .* loss ([0-9.]+)",
    "validation_loss": r"^step .* validation ([0-9.]+)",
    "grad_norm": r"^step .* grad ([0-9.]+)",
}


def create_training_job(run: Run, group: StageGroup, name: str, code: str, run_files: str = "") -> dict[str, Any]:
    """The request of a training job `name` for a group. `code`: name of the code's copy below `<cluster.root>/code`.

    `run_files`: their digest, without which a job with a store runs nothing.

    Raises UserError where the run file cannot be a training job.
    """
    section = sagemaker_section(run.config)
    instance_type = group.instance_type(run)
    types = group.instance_types(run)
    _require_possible(group, instance_type)
    _require_alike(types)
    request: dict[str, Any] = {
        "TrainingJobName": name,
        "RoleArn": section.role,
        "AlgorithmSpecification": {
            "TrainingImage": image(run.config, instance_type),
            "TrainingInputMode": "File",
            "ContainerEntrypoint": list(_ENTRYPOINT),
            "ContainerArguments": [line for line in _START.read_text(encoding="utf-8").splitlines() if line],
        },
        "HyperParameters": hyperparameters(run, group, name, code, run_files),
        "InputDataConfig": _channels(run.config, code),
        # nothing is written to /opt/ml/model: compressing it would take hours
        "OutputDataConfig": {"S3OutputPath": section.output_path, "CompressionType": "NONE"},
        "ResourceConfig": {
            **(
                {"InstanceType": f"ml.{instance_type}"}
                if len(types) == 1
                else {"InstancePreferences": [{"InstanceType": f"ml.{name}"} for name in types]}
            ),
            "InstanceCount": group.nodes,
            **({} if all(one.nvme for one in _instances(types)) else {"VolumeSizeInGB": section.volume_gb}),
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": group.seconds},
        "Tags": [
            {"Key": RUN_TAG, "Value": run.paths.full_name},
            {"Key": "hyperpod-ft:stages", "Value": " ".join(stage.name for stage in group.stages)},
        ],
    }
    if environment := _environment(run.config):
        request["Environment"] = environment
    if section.remote_debug:
        request["RemoteDebugConfig"] = {"EnableRemoteDebug": True}
    if section.file_system:
        request["VpcConfig"] = {
            "Subnets": list(section.file_system.subnets),
            "SecurityGroupIds": list(section.file_system.security_groups),
        }
    if run.config.cluster.max_restarts:
        # SageMaker retries under the same name, and only after its internal errors
        request["RetryStrategy"] = {"MaximumRetryAttempts": min(run.config.cluster.max_restarts, _MAX_RETRIES)}
    if group.starts_ranks:
        _add_training_settings(request, run, group)
    return request


def _require_possible(group: StageGroup, instance_type: str) -> None:
    if instance_type == "local":
        raise UserError(
            "cluster.instance_type: `local` cannot be a training job",
            "set one, such as c7i.4xlarge (CPUs) or g6.12xlarge",
        )
    if group.seconds > MAX_SECONDS:
        raise UserError(
            f"cluster.time_limit: the time limits of {', '.join(stage.name for stage in group.stages)} together are"
            " longer than the 28 days of a training job",
            "shorten them: a training run that reaches its limit is continued by another job",
        )


def _require_alike(types: Sequence[str]) -> None:
    """The plan of a run is for the first type, and must hold on the others."""
    known = _instances(types)
    for other in known[1:]:
        if (other.device, other.ranks) != (known[0].device, known[0].ranks) or other.rank_gib < known[0].rank_gib:
            raise UserError(
                f"sagemaker.other_instance_types: {other.name} has not as many devices as {known[0].name}, of at least"
                " their memory",
                "leave it out",
            )


def _instances(types: Sequence[str]) -> list[Instance]:
    return [CATALOGUE.get(name, Instance(name, "cpu", None)) for name in types]


def _environment(config: RunConfig) -> dict[str, str]:
    """The part of `cluster.environment` that a container needs before it has the run's files."""
    given = config.cluster.environment
    wanted = {name: value for name, value in given.items() if _OF_CONNECTIONS.fullmatch(name)}
    for name, value in wanted.items():
        if len(value) > _MAX_VALUE_LENGTH:
            raise UserError(
                f"cluster.environment: {name} has {len(value)} characters; SageMaker accepts {_MAX_VALUE_LENGTH}",
                "shorten it, or set it in an image of your own (sagemaker.image)",
            )
    return wanted


def hyperparameters(run: Run, group: StageGroup, name: str, code: str, run_files: str) -> dict[str, str]:
    """The launcher's parameters for the container; all values are strings."""
    pins = pins_file(rules_of(run.config.engine).environment_name(run.config)).relative_to(PACKAGE.parent)
    # env.python is an interpreter of the image that has the packages
    own = bool(run.config.env.python)
    return Hyperparameters(
        job=name,
        group=group.name,
        stages=" ".join(stage.name for stage in group.stages),
        root=str(run.paths.root),
        run_directory=str(run.paths.directory),
        max_runtime=str(group.seconds),
        python=str(run.paths.python) if own else "",
        pins="" if own else pins.as_posix(),
        store=store_of(run.config) or "",
        run_files=run_files,
        code=code,
    ).as_strings()


def _add_training_settings(request: dict[str, Any], run: Run, group: StageGroup) -> None:
    section = sagemaker_section(run.config)
    request["AlgorithmSpecification"]["MetricDefinitions"] = [
        {"Name": metric, "Regex": regex} for metric, regex in _METRICS.items()
    ]
    resources, stopping = request["ResourceConfig"], request["StoppingCondition"]
    if section.keep_alive:
        resources["KeepAlivePeriodInSeconds"] = 60 * section.keep_alive
    if section.training_plan:
        resources["TrainingPlanArn"] = section.training_plan
    wait = time_limit_seconds(section.max_wait)
    if section.spot:
        request["EnableManagedSpotTraining"] = True
        stopping["MaxWaitTimeInSeconds"] = min(group.seconds + wait, MAX_SECONDS)
    elif group.accelerated(run):
        stopping["MaxPendingTimeInSeconds"] = min(max(wait, _MIN_PENDING_SECONDS), MAX_SECONDS)


def _channels(config: RunConfig, code: str) -> list[dict[str, Any]]:
    section = sagemaker_section(config)
    if section.file_system is None:
        source = {
            "S3DataType": "S3Prefix",
            "S3Uri": f"{store_of(config)}/code/{code}/",
            "S3DataDistributionType": "FullyReplicated",
        }
        return [{"ChannelName": CODE, "DataSource": {"S3DataSource": source}, "InputMode": "File"}]
    directory = section.file_system.directory
    return [
        _file_system_channel(section.file_system.id, CODE, f"{directory}/code/{code}", "ro"),
        _file_system_channel(section.file_system.id, FSX, directory, "rw"),
    ]


def _file_system_channel(file_system: str, name: str, directory: str, mode: str) -> dict[str, Any]:
    source = {
        "FileSystemId": file_system,
        "FileSystemAccessMode": mode,
        "FileSystemType": "FSxLustre",
        "DirectoryPath": directory,
    }
    return {"ChannelName": name, "DataSource": {"FileSystemDataSource": source}, "InputMode": "File"}


def job_images(run: Run, stages: Sequence[StagePlan]) -> list[str]:
    """The images of the training jobs of these stages, as URIs. Raises UserError where AWS publishes none."""
    return [image(run.config, group.instance_type(run)) for group in groups(stages)]


def previews(run: Run, stages: Sequence[StagePlan]) -> Iterator[JobPreview]:
    """The training jobs of these stages."""
    for group in groups(stages):
        instance_type = group.instance_type(run)
        try:
            chosen = image(run.config, instance_type)
        except UserError as error:
            chosen = str(error)
        names = tuple(stage.name for stage in group.stages)
        types = " or ".join(f"ml.{name}" for name in group.instance_types(run))
        yield JobPreview(SAGEMAKER, group.name, names, f"{group.nodes} x {types}", chosen, group.seconds)
