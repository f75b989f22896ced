"""A run and a group of stages -> CreateTrainingJob: golden requests, and botocore's model of every one of them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.aws.checks.service_model import check_request
from hyperpod_ft.config import run_file
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.engines.metrics import StepMetrics
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker import images
from hyperpod_ft.sagemaker.groups import groups, job_name, name_prefix, next_number, number_of, recorded_jobs
from hyperpod_ft.sagemaker.images import image
from hyperpod_ft.sagemaker.training_request import create_training_job
from tests import golden
from tests.conftest import run_file_values
from tests.unit.sagemaker.training_jobs_in_memory import FSX, ROLE

GOLDEN = Path(__file__).parent / "golden"
STORE = {"region": "us-west-2", "role": ROLE, "store": "s3://bucket/ft"}
NEURON = {
    "engine": "neuron",
    "cluster__instance_type": "trn1.32xlarge",
    "parallelism": {"tensor_parallel": 8},
    "env": {},
    "dataset__max_length": 2048,
}
CASES: dict[str, dict[str, Any]] = {
    "cpu": {"sagemaker": STORE, "cluster__instance_type": "c7i.4xlarge"},
    "p4d-spot": {
        "sagemaker": STORE | {"spot": True},
        "cluster__instance_type": "p4d.24xlarge",
        "cluster__nodes": 2,
        "parallelism": {},
        "env": {},
    },
    "trn1-fsx": {"sagemaker": FSX | {"keep_alive": 30, "remote_debug": True}, **NEURON},
    "trn2-plan": {
        "sagemaker": STORE
        | {"training_plan": "arn:aws:sagemaker:us-west-2:123456789012:training-plan/plan", "image": "own/image:1"},
        **NEURON,
        "cluster__instance_type": "trn2.48xlarge",
        "parallelism": {"tensor_parallel": 4},
    },
}


def make(overrides: dict[str, Any]) -> Run:
    """A run whose paths are the same on every machine."""
    config = run_file.validate(run_file_values(Path("/home/me/ft"), **overrides), "run.yaml")
    values = config.model_dump() | {"env": config.env.model_dump() | {"python": None}}
    return Run.of(RunConfig.model_validate(values))


def requests(run: Run) -> list[dict[str, Any]]:
    return [
        create_training_job(
            run, group, job_name(run, group.name, 1), "hyperpod-ft-0.1.0-0123456789abcdef0123456789abcdef"
        )
        for group in groups(run.plan.stages)
    ]


def recorded(name: str) -> str:
    run = make(CASES[name])
    made = requests(run)
    for request in made:
        assert check_request("sagemaker", "CreateTrainingJob", request) == []
        request["AlgorithmSpecification"].pop("ContainerArguments")  # a program of the kit's, word for word
    # the id changes with every key of the run file that concerns training
    return json.dumps(made, indent=2).replace(run.plan.run_id, "0123456789ab") + "\n"


def test_requests_are_as_recorded_and_as_the_service_takes_them() -> None:
    base = recorded("cpu")
    golden.check(GOLDEN / "cpu.json", base)
    for name in sorted(set(CASES) - {"cpu"}):
        golden.check(GOLDEN / f"{name}.diff", golden.difference(base, recorded(name)))


def test_training_may_have_other_types_that_its_plan_holds_on() -> None:
    def made(*others: str) -> list[dict[str, Any]]:
        return requests(make(CASES["p4d-spot"] | {"sagemaker": STORE | {"other_instance_types": others}}))

    prepare, train, finish = made("p4de.24xlarge", "ml.p5.48xlarge")
    wanted = [{"InstanceType": f"ml.{name}"} for name in ("p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge")]
    for request in (train, finish):  # which answers on GPUs
        assert request["ResourceConfig"]["InstancePreferences"] == wanted
        assert "InstanceType" not in request["ResourceConfig"]
        assert check_request("sagemaker", "CreateTrainingJob", request) == []
    assert prepare["ResourceConfig"]["InstanceType"] == "ml.c7i.4xlarge"
    for other in ("p5.4xlarge", "g5.48xlarge", "trn1.32xlarge", "c7i.4xlarge"):
        with pytest.raises(UserError, match=f"other_instance_types: {other} has not as many devices as p4d"):
            made(other)


def test_three_jobs_of_which_one_has_the_accelerators() -> None:
    run = make(CASES["trn1-fsx"])
    found = groups(run.plan.stages)
    assert [group.name for group in found] == ["prepare", "train", "finish"]
    assert [stage.name for group in found for stage in group.stages] == [stage.name for stage in run.plan.stages]
    assert [group.instance_type(run) for group in found] == ["c7i.4xlarge", "trn1.32xlarge", "c7i.4xlarge"]


def test_answers_on_gpus_take_one_instance_of_the_training() -> None:
    run = make(CASES["p4d-spot"])
    finish = groups(run.plan.stages)[-1]
    assert (finish.instance_type(run), finish.nodes) == ("p4d.24xlarge", 1)
    merge = groups([run.plan["consolidate"], run.plan["merge"]])[-1]
    assert merge.instance_type(run) == "c7i.4xlarge"


def test_what_pip_and_the_pulling_of_files_need_reaches_them() -> None:
    """They run before any script of a stage, which exports the rest."""
    reaching = {
        "PIP_INDEX_URL": "https://packages.example.com/simple",
        "https_proxy": "http://proxy.example.com:3128",
        "NO_PROXY": "169.254.169.254",
        "AWS_CA_BUNDLE": "/etc/pki/ca.pem",
    }
    environment = {**reaching, "NCCL_DEBUG": "INFO", "LONG": "x" * 600}
    made = requests(make(CASES["cpu"] | {"cluster__environment": environment}))
    assert [request["Environment"] for request in made] == [reaching] * 3
    assert check_request("sagemaker", "CreateTrainingJob", made[0]) == []
    with pytest.raises(UserError, match=r"cluster\.environment: PIP_TRUSTED_HOST has 600 characters"):
        requests(make(CASES["cpu"] | {"cluster__environment": {"PIP_TRUSTED_HOST": "x" * 600}}))


def test_local_is_no_instance_type_of_a_training_job() -> None:
    with pytest.raises(UserError, match=r"cluster\.instance_type.*`local`.*set one"):
        requests(make({"sagemaker": STORE}))


def test_a_time_limit_that_sagemaker_does_not_take_is_refused() -> None:
    with pytest.raises(UserError, match=r"cluster\.time_limit.*28 days"):
        requests(make(CASES["cpu"] | {"cluster__time_limit": "29-00:00:00"}))


def test_names_are_valid_short_and_of_one_place(tmp_path: Path) -> None:
    run = make(CASES["cpu"] | {"name": "A_very.long-name" * 4})
    name = job_name(run, "prepare", 9999)
    assert len(name) <= 63
    assert re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", name)
    assert run.plan.run_id in name
    elsewhere = make(CASES["cpu"] | {"name": run.config.name, "sagemaker": STORE | {"store": "s3://bucket/other"}})
    assert elsewhere.plan.run_id == run.plan.run_id
    assert name_prefix(elsewhere) != name_prefix(run)


def test_numbers_are_not_used_again(make_run: Callable[..., Run]) -> None:
    run = make_run(sagemaker=STORE)
    assert next_number(run, "train") == 1
    run.journal.add_job(Job("train", job_name(run, "train", 2), "sagemaker", "2026-01-01T00:00:00Z"))
    assert next_number(run, "train", [job_name(run, "train", 12), job_name(run, "finish", 40), "other-99"]) == 13
    assert number_of(job_name(run, "train", 13)) == 13


@pytest.mark.parametrize("old", ["2026-01-01T00:00:00Z", "2026-01-03T00:00:00Z"], ids=["", "of a fast clock"])
def test_only_the_newest_submission_is_planned(make_run: Callable[..., Run], old: str) -> None:
    new = "2026-01-02T00:00:00Z"
    a, b = (f"hyperpod-ft-0.1.0-{letter * 32}" for letter in "ab")
    run = make_run(sagemaker=STORE)
    for stage, group, number, submitted, code in (
        ("download", "prepare", 1, old, a),
        ("train", "train", 1, old, a),
        ("dataset", "prepare", 2, new, b),
        ("precompile", "train", 2, new, b),
        ("train", "train", 2, new, b),
        ("train", "train", 3, new, b),
    ):
        run.journal.add_job(Job(stage, job_name(run, group, number), "sagemaker", submitted, code=code))
    run.journal.add_job(Job("merge", "7", "slurm", new))
    assert [(job.name, job.stages, job.code) for job in recorded_jobs(run)] == [
        (job_name(run, "prepare", 2), ("dataset",), b),
        (job_name(run, "train", 2), ("precompile",), b),
        (job_name(run, "train", 3), ("train",), b),
    ]


def test_images() -> None:
    def of(section: dict[str, Any], instance_type: str, **changes: Any) -> str:
        return image(make({"sagemaker": section, **changes}).config, instance_type)

    cuda = "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch:2.13-cu133-amzn2023-sagemaker"
    assert of(STORE, "p5.48xlarge") == cuda
    assert of(STORE, "c5.xlarge") == of(STORE, "m8i.96xlarge") == cuda.replace("cu133", "cpu")
    china = STORE | {"region": "cn-north-1", "role": ROLE.replace("aws", "aws-cn")}
    assert of(china, "g6.xlarge").startswith("727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn/pytorch:")
    assert "neuronx" in of(STORE, "c7i.4xlarge", **NEURON)
    assert of(STORE | {"image": "own/image:1"}, "trn2.48xlarge") == "own/image:1"
    with pytest.raises(UserError, match=r"sagemaker\.image.*trn2"):
        of(STORE, "trn2.48xlarge")
    other_sdk = NEURON | {"env": {"sdk": "2.28.0"}}
    with pytest.raises(UserError, match=r"sagemaker\.image.*2\.26\.1.*2\.28\.0"):
        of(STORE, "trn1.32xlarge", **other_sdk)
    assert of(STORE | {"image": "own/image:1"}, "trn1.32xlarge", **other_sdk) == "own/image:1"
    with pytest.raises(UserError, match=r"sagemaker\.region"):
        of(STORE | {"region": "us-moon-1"}, "c7i.xlarge")


def test_every_region_that_has_training_jobs_has_an_account() -> None:
    from hyperpod_ft.aws.checks.service_model import known_regions

    offered = {
        region
        for region, partition in known_regions("sagemaker").items()
        if partition in ("aws", "aws-cn", "aws-us-gov")
    }
    assert offered - set(images.ACCOUNTS) == set()


def test_metrics_are_read_from_the_lines_of_a_step() -> None:
    row = StepMetrics(12, 0.1, 2.31, 1.9e-4, 0.83, 1.5, 1.0, 1.0, None, 1234.0, 0.41, 1.0, 2.0, 3.0, {})
    definitions = requests(make(CASES["cpu"]))[1]["AlgorithmSpecification"]["MetricDefinitions"]
    found = {each["Name"]: re.search(each["Regex"], row.line(300, 80)) for each in definitions}
    assert {name: match and match[1] for name, match in found.items()} == {
        "loss": "2.3100",
        "validation_loss": "1.5000",
        "grad_norm": "0.83",
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"store": None}, "either store or file_system"),
        ({"file_system": FSX["file_system"]}, "either store or file_system"),
        ({"store": "bucket/ft"}, r"s3://bucket"),
        ({"store": "s3://bucket/../x y"}, r"s3://bucket"),
        ({"role": "ft"}, "the ARN of a role"),
        ({"cpu_instance_type": "big"}, "an instance type"),
        (
            {"spot": True, "training_plan": "arn:aws:sagemaker:us-west-2:123456789012:training-plan/x"},
            "spot and training",
        ),
        ({"spot": True, "keep_alive": 30}, "spot and keep_alive"),
        ({"spot": True, "other_instance_types": ["p5.48xlarge"]}, "other_instance_types: not with spot"),
        ({"other_instance_types": ["big"]}, "an instance type"),
        ({"store": None, "file_system": FSX["file_system"]}, "file_system needs output"),
        ({"keep_alive": 361}, "360"),
        ({"regoin": "us-west-2"}, "did you mean region"),
    ],
)
def test_mistakes_in_the_section_are_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        make({"sagemaker": STORE | changes})
    assert len(str(refused.value).splitlines()) == 1
