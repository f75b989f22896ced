"""`hyperpod-ft deploy` as users run it, on the stand-in for AWS, whose endpoints run the kit's own server."""

import json
import re
import shlex
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.runs import chain
from hyperpod_ft.runs.records import Record, utc_now
from hyperpod_ft.runs.results.evaluation import Compared, EvaluationResult, Metric, Score
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker.endpoint.creation import place
from hyperpod_ft.sagemaker.endpoint.deployment import deployment, endpoint_name, with_settings
from tests.aws.account_place import trust
from tests.aws.conftest import REGION, Aws
from tests.aws.endpoint_run import BUCKET, ROLE, make_run, make_t5_run, only_in_store
from tests.aws.kit import Started, environment_of, start

WRITES = ("Create", "Delete", "Put", "Register", "Update", "POST", "PUT", "DELETE")


class Deploy:
    """The command, with a finished run and what an endpoint needs in an account: a role and a bucket."""

    def __init__(self, aws: Aws, run: Run, home: Path) -> None:
        self.aws, self.run, self.name = aws, run, endpoint_name(run)
        self.environment = environment_of(aws, home)
        role = ROLE.rpartition("/")[2]
        aws.client("iam").create_role(RoleName=role, AssumeRolePolicyDocument=trust("sagemaker.amazonaws.com"))
        aws.client("s3").create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
        self._before = len(aws.requests())

    def start(self, *arguments: str) -> Started:
        return start(self.run.paths.root, self.environment, "deploy", *arguments)

    def __call__(self, *arguments: str, status: int = 0) -> str:
        return self.start(*arguments).finish(status)

    @property
    def directory(self) -> str:
        return str(self.run.paths.directory)

    @property
    def delete_command(self) -> str:
        return f"hyperpod-ft deploy delete {self.directory} --region {REGION}"

    def objects(self) -> list[str]:
        listing = self.aws.client("s3").list_objects_v2(Bucket=BUCKET)
        return [entry["Key"] for entry in listing.get("Contents", [])]

    def nothing_left(self) -> bool:
        """Whether nothing that AWS bills is left."""
        sagemaker, logs = self.aws.client("sagemaker"), self.aws.client("logs")
        return not (
            sagemaker.list_endpoints()["Endpoints"]
            or sagemaker.list_endpoint_configs()["EndpointConfigs"]
            or sagemaker.list_models()["Models"]
            or self.objects()
            or logs.describe_log_groups(logGroupNamePrefix="/aws/sagemaker/")["logGroups"]
        )

    def writes(self) -> list[str]:
        """The operations since the account was made ready that create, change or delete."""
        return [operation for _, operation in self.aws.requests()[self._before :] if operation.startswith(WRITES)]

    def recorded(self, column: str = "tuned", **container: Any) -> None:
        """Containers answer from samples.json, without a model."""
        rows = json.loads(self.run.paths.samples_path.read_text())["prompts"]
        self.aws.scenario(endpoint_container={"answers": {row["prompt"]: row[column] for row in rows}, **container})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("deploy"))


@pytest.fixture
def deploy(aws: Aws, finished: Run, tmp_path: Path) -> Deploy:
    finished.paths.endpoint_proof.unlink(missing_ok=True)
    return Deploy(aws, finished, tmp_path)


def test_an_endpoint_is_deployed_asked_compared_and_deleted(deploy: Deploy) -> None:
    deploy.aws.scenario(prices={"ml.g6.2xlarge": 1.25})
    output = deploy(deploy.directory)
    assert "3 of 3 answers equal samples.json" in output
    assert "$1.25 an hour" in output
    proof = json.loads(deploy.run.paths.endpoint_proof.read_text())
    assert proof["equal"] == proof["answers"] == 3
    assert proof["distinguishing"] == proof["like_tuned"] == 3
    bundle = f"kit/endpoints/{deploy.name}/{deploy.run.plan['merge'].fingerprint[:12]}-"
    assert any(key.startswith(bundle) and key.endswith("/model.safetensors") for key in deploy.objects())
    (listed,) = json.loads(deploy("list", "--json"))
    assert (listed["name"], listed["status"], listed["price_per_hour"]) == (deploy.name, "InService", 1.25)
    assert listed["run"] == f"tiny.llama/{deploy.run.plan.run_id}"
    question = json.loads(deploy.run.paths.samples_path.read_text())["prompts"][0]
    asked = deploy("ask", deploy.name, question["prompt"], "--raw", "--max-tokens", "12")
    assert asked == f"{question['tuned']}\n"
    assert "Loading tuned" in deploy("logs", deploy.directory)
    _check_openai(deploy)
    again = deploy(deploy.directory)
    assert "already exists" in again
    assert "created" not in again
    deploy("delete", deploy.name, "--yes")
    assert deploy.nothing_left()
    assert "no endpoints" in deploy("list")
    assert "nothing that was created" in deploy("delete", deploy.name, "--yes", status=2)


def _check_openai(deploy: Deploy) -> None:
    """The base URL and token that `url` prints are enough for a client; errors of the server reach the user."""
    base_url, token = (line.partition("=")[2] for line in deploy("url", deploy.name).splitlines())
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps({"model": "", "messages": [{"role": "user", "content": "squeue"}], "max_tokens": 4}).encode(),
        {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        assert json.load(answer)["choices"][0]["message"]["content"]
    assert deploy("ask", deploy.name, "squeue", "--max-tokens", "4").strip()
    assert "max_tokens" in deploy("ask", deploy.name, "squeue", "--max-tokens", "100000", status=2)


def test_a_dry_run_shows_requests_fit_and_price_and_changes_nothing(deploy: Deploy) -> None:
    deploy.aws.scenario(prices={"ml.g6.xlarge": 0.5})
    output = deploy("--dry-run", deploy.directory, "--set", "deploy.instance_type=g6.xlarge")
    for text in ("CreateModel {", "CreateEndpointConfig {", "CreateEndpoint {", "$0.50 an hour", "ml.g6.xlarge"):
        assert text in output
    assert "GiB of weights" in output
    assert deploy.writes() == []
    assert "unknown" in deploy("--dry-run", deploy.directory)  # the price of another type


def test_a_broken_container_shows_its_log_and_leaves_nothing(deploy: Deploy) -> None:
    deploy.aws.scenario(endpoint_container={"broken": "ValueError: no kernel for head_dim 17"})
    output = deploy(deploy.directory, status=2)
    assert "ValueError: no kernel for head_dim 17" in output
    assert "did not pass the ping health check" in output
    assert deploy.nothing_left()
    assert "head_dim 17" in (deploy.run.paths.logs / "endpoint.log").read_text()
    kept = deploy(deploy.directory, "--keep", status=2)
    assert f"kept and may cost money; to delete it: {deploy.delete_command}" in kept
    assert not deploy.nothing_left()
    # a failed endpoint is replaced, once its container works
    deploy.recorded(broken="")
    assert "3 of 3 answers equal" in deploy(deploy.directory)


def test_a_broken_component_is_replaced(deploy: Deploy) -> None:
    """Its endpoint is in service: only the component has failed."""
    deploy.aws.scenario(endpoint_container={"broken": "no kernel"})
    output = deploy(deploy.directory, "--set", "deploy.scale_to_zero=true", "--keep", status=2)
    assert "no kernel" in output
    assert "inference component" in output
    deploy.recorded(broken="")
    assert "3 of 3 answers equal" in deploy(deploy.directory, "--set", "deploy.scale_to_zero=true")
    deploy("delete", deploy.directory, "--yes")
    assert deploy.nothing_left()


def test_a_bucket_in_another_region_is_refused_before_anything_costs(deploy: Deploy) -> None:
    deploy.aws.client("s3", "eu-west-1").create_bucket(
        Bucket="far-away", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )
    output = deploy(deploy.directory, "--set", "deploy.store=s3://far-away", status=2)
    assert "far-away is in eu-west-1" in output
    assert "far-nowhere" in deploy(deploy.directory, "--set", "deploy.store=s3://far-nowhere", status=2)
    assert deploy.nothing_left()


@pytest.mark.parametrize("seen", ["uploading", "created configuration", "created endpoint"])
def test_it_may_be_killed_anywhere_and_run_again(deploy: Deploy, seen: str) -> None:
    deploy.recorded()
    deploy.start(deploy.directory).kill_at(seen)
    if seen in ("uploading", "created configuration"):
        # half of a deployment can be deleted as well as completed
        deploy("delete", deploy.directory, "--yes", status=0 if deploy.objects() else 2)
        assert deploy.nothing_left()
    output = deploy(deploy.directory)
    assert "3 of 3 answers equal" in output
    deploy("delete", deploy.directory, "--yes")
    assert deploy.nothing_left()


@pytest.mark.parametrize("seen", ["endpoint: Deleting", "deleted 6 objects"])
def test_a_deletion_may_be_killed_anywhere_and_run_again(deploy: Deploy, seen: str) -> None:
    deploy.recorded()
    deploy(deploy.directory)
    deploy.start("delete", deploy.name, "--yes").kill_at(seen)
    deploy(
        "delete", deploy.name, "--yes", status=2 if not deploy.aws.client("sagemaker").list_models()["Models"] else 0
    )
    assert deploy.nothing_left()


def test_an_adapter_is_served_beside_its_base(deploy: Deploy) -> None:
    output = deploy(deploy.directory, "--set", "deploy.model=adapter")
    assert "3 of 3 answers equal" in output
    assert any(key.endswith("/adapters/tuned/adapter_model.safetensors") for key in deploy.objects())
    # with other settings it is another endpoint, which is not made beside this one
    assert "other settings" in deploy(deploy.directory, status=2)


def test_a_model_in_the_runs_store_is_served_from_there(deploy: Deploy, tmp_path: Path) -> None:
    deploy.recorded()
    run = only_in_store(deploy.run, tmp_path / "laptop", deploy.aws.client("s3"))
    before = deploy.objects()
    output = deploy(str(run.paths.directory))
    assert "3 of 3 answers equal" in output
    assert "uploading" not in output
    deploy("delete", str(run.paths.directory), "--yes")
    assert deploy.objects() == before  # the run's own model is not the endpoint's to delete
    # beside the kit's code, it is a copy
    output = deploy(str(run.paths.directory), "--set", "deploy.container=kit")
    assert "copied from the run's store" in output and "3 of 3 answers equal" in output
    planned = deployment(with_settings(run, ["deploy.container=kit"]), REGION)
    writes = deploy.writes()
    place(deploy.aws.client("s3"), run, planned.target.bundle, planned.target.url, print)
    assert deploy.writes() == writes, "nothing is copied twice"
    deploy("delete", str(run.paths.directory), "--yes")
    assert deploy.objects() == before
    assert not (run.paths.tuned_model / "model.safetensors").exists()


def test_an_encoder_decoder_is_served_by_the_kits_own_server(aws: Aws, tmp_path: Path) -> None:
    deploy = Deploy(aws, make_t5_run(tmp_path / "t5"), tmp_path)
    output = deploy(deploy.directory)
    assert "3 prompts of samples.json, 1 at a time" in output  # the instance has one GPU
    assert "3 of 3 answers equal samples.json; of 3 where" in output
    assert any(key.endswith("/hyperpod_ft.zip") for key in deploy.objects())
    assert "initialized by hyperpod_ft.serving.djl" in deploy("logs", deploy.name)
    question = json.loads(deploy.run.paths.samples_path.read_text())["prompts"][1]
    for way in ([], ["--raw"]):  # as the chat template puts it, and as it is
        assert deploy("ask", deploy.name, question["prompt"], "--max-tokens", "12", *way) == f"{question['tuned']}\n"
    assert "has room for 128" in deploy("ask", deploy.name, "squeue", "--max-tokens", "128", status=2)
    _check_openai(deploy)
    deploy("delete", deploy.name, "--yes")
    assert deploy.nothing_left()


def test_the_model_is_registered_with_its_scores_and_what_it_was_made_of(deploy: Deploy, tmp_path: Path) -> None:
    metric = Metric("grade_school", "exact_match", "strict-match", "1", 5, 10, "", True)
    scores = (Compared(metric, Score(0.25, 0.01), Score(0.5, 0.02)),)
    facts = EvaluationResult(("grade_school",), None, False, scores, {}, "cpu").as_facts()
    merged = deploy.run.plan["merge"].fingerprint
    record = Record("eval", "f", {"merge": merged}, (), facts, utc_now(), 0.0, "test", "")
    evaluated = deploy.run.paths.record_path("merge").with_name("eval-0.json")
    record.write(evaluated)
    output = deploy("register", "--dry-run", deploy.directory, "--group", "assistants")
    assert "CreateModelPackage {" in output and "S3 bills its copy of the model" in output
    assert deploy.writes() == []
    (arn,) = re.findall(r"Registered: (\S+)", deploy("register", deploy.directory, "--group", "assistants"))
    sagemaker = deploy.aws.client("sagemaker")
    package = sagemaker.describe_model_package(ModelPackageName=arn)
    assert (package["ModelPackageGroupName"], package["ModelApprovalStatus"]) == ("assistants", "PendingManualApproval")
    known = package["CustomerMetadataProperties"]
    assert known["grade_school exact_match 5-shot strict-match"] == "0.5000 base 0.2500"
    assert known["digest of the model"] == chain.model_digest(deploy.run.journal)
    assert "tiny-llama @ local-" in known["base model"]
    pattern = r"[\w .:/=+@-]{1,128}"  # as in the service's model, which Python's `re` does not read
    assert all(re.fullmatch(pattern, text) for text in (*known, *known.values()))
    (container,) = package["InferenceSpecification"]["Containers"]
    files = container["ModelDataSource"]["S3DataSource"]["S3Uri"].removeprefix(f"s3://{BUCKET}/")
    assert f"{files}model.safetensors" in deploy.objects()
    evaluated.unlink()
    # the same model without scores is another version; one in the run's store is copied within S3
    there = only_in_store(deploy.run, tmp_path / "laptop", deploy.aws.client("s3"))
    for expected in ("Registered: ", "already"):
        output = deploy("register", str(there.paths.directory), "--group", "assistants")
        assert expected in output and "uploading" not in output
    assert len(sagemaker.list_model_packages(ModelPackageGroupName="assistants")["ModelPackageSummaryList"]) == 2
    copied = f"store/registry/{deploy.name}/"
    assert sum(key.startswith(copied) and key.endswith("/model.safetensors") for key in deploy.objects()) == 1


def test_it_scales_to_zero_as_an_inference_component(deploy: Deploy) -> None:
    deploy.recorded()
    output = deploy(deploy.directory, "--set", "deploy.scale_to_zero=true")
    assert "3 of 3 answers equal" in output
    assert deploy.writes().count("PutScalingPolicy") == 2
    (alarm,) = deploy.aws.client("cloudwatch").describe_alarms()["MetricAlarms"]
    assert alarm["MetricName"] == "NoCapacityInvocationFailures"
    assert "recorded answers" in deploy("logs", deploy.name)
    deploy("delete", deploy.name, "--yes")
    assert deploy.nothing_left()
    assert deploy.aws.client("cloudwatch").describe_alarms()["MetricAlarms"] == []


def test_a_component_that_is_still_being_created_is_deleted(deploy: Deploy) -> None:
    """SageMaker refuses to delete it until it has been created."""
    deploy.aws.scenario(endpoint_container={"hangs": True})
    process = deploy.start(deploy.directory, "--set", "deploy.scale_to_zero=true")
    process.kill_at("created inference component")
    deleting = deploy.start("delete", deploy.name, "--yes")
    deleting.wait_for("inference component: Deleting")  # asked for, and refused
    deploy.aws.scenario(seconds={"endpoint.health": 0.0})
    deleting.finish()
    assert deploy.nothing_left()


def test_what_others_made_is_not_deleted_whatever_its_name(deploy: Deploy) -> None:
    """A name that ends with a UUID has the form of the kit's names."""
    name = "theirs-0f8fad5b-d9cb-469f-a165-70867728950e"
    deploy.recorded()
    deploy(deploy.directory)
    sagemaker = deploy.aws.client("sagemaker")
    (ours,) = (model["ModelName"] for model in sagemaker.list_models()["Models"])
    container = sagemaker.describe_model(ModelName=ours)["PrimaryContainer"]
    for model in (f"{name}-1", f"{deploy.name}-theirs"):
        sagemaker.create_model(ModelName=model, PrimaryContainer=container, ExecutionRoleArn=ROLE)
    variant = {"VariantName": "all", "ModelName": f"{name}-1", "InstanceType": "ml.m5.large", "InitialInstanceCount": 1}
    sagemaker.create_endpoint_config(EndpointConfigName=f"{name}-1", ProductionVariants=[variant])
    sagemaker.create_endpoint(EndpointName=name, EndpointConfigName=f"{name}-1")
    before = len(deploy.writes())
    output = deploy("delete", name, "--yes", status=2)
    assert f"endpoint {name}: has no tag hyperpod-ft:run" in output
    assert len(deploy.writes()) == before
    deploy("delete", deploy.name, "--yes")
    assert [model["ModelName"] for model in sagemaker.list_models()["Models"]] == [f"{name}-1", f"{deploy.name}-theirs"]
    assert [one["EndpointName"] for one in sagemaker.list_endpoints()["Endpoints"]] == [name]


def test_following_the_log_of_no_endpoint_ends(deploy: Deploy) -> None:
    assert "no endpoint tiny-0123456789ab" in deploy("logs", "-f", "tiny-0123456789ab", status=2)


def test_what_answers_like_the_base_model_is_no_proof(deploy: Deploy) -> None:
    """As when a server ignores an adapter."""
    deploy.recorded("base")
    output = deploy(deploy.directory, status=1)
    assert "does not answer like the tuned model" in output
    assert "0 of 3 answers equal" in output
    assert json.loads(deploy.run.paths.endpoint_proof.read_text())["like_tuned"] == 0


def test_what_the_account_lacks_is_found_before_anything_is_uploaded(deploy: Deploy) -> None:
    deploy.aws.scenario(quotas={"ml.g6.2xlarge for endpoint usage": 0})
    for arguments in (["--dry-run"], []):
        output = deploy(*arguments, deploy.directory, status=2)
        assert "deploy.instance_type: quota `ml.g6.2xlarge for endpoint usage` is 0; 1 are needed" in output
        assert "request-service-quota-increase --region us-west-2" in output
    deploy.aws.scenario(quotas={})
    output = deploy(deploy.directory, "--set", f"deploy.role={ROLE}-misspelled", status=2)
    assert "deploy.role: no role endpoint-misspelled" in output
    own = "123456789012.dkr.ecr.us-west-2.amazonaws.com/own:9"
    output = deploy(deploy.directory, "--set", f"deploy.image={own}", status=2)
    assert f"deploy.image: no image {own}; set deploy.image to the URI of one that exists" in output
    assert deploy.writes() == [] and deploy.objects() == []


def test_what_may_not_be_checked_is_a_warning(deploy: Deploy) -> None:
    denied = [("service-quotas", "ListAWSDefaultServiceQuotas"), ("iam", "GetRole"), ("ecr", "BatchGetImage")]
    deploy.aws.scenario(
        errors=[
            {"service": service, "operation": operation, "code": "AccessDenied", "times": 9}
            for service, operation in denied
        ]
    )
    output = deploy("--dry-run", deploy.directory)
    assert "warning: deploy.instance_type: could not check its quota" in output
    assert "warning: deploy.role: could not check the role" in output
    assert "warning: deploy.image: could not check its image" in output


def test_a_quota_that_other_endpoints_use_is_explained(deploy: Deploy) -> None:
    deploy.aws.scenario(
        errors=[{"service": "sagemaker", "operation": "CreateEndpoint", "code": "ResourceLimitExceeded"}]
    )
    output = deploy(deploy.directory, status=2)
    assert "ResourceLimitExceeded" in output
    assert "quota" in output
    assert "kept and may cost money; request a higher quota" in output
    assert output.endswith(f"to delete it: {deploy.delete_command}\n")
    assert deploy.objects()  # the uploaded model


@pytest.mark.parametrize(
    ("service", "operation"),
    [
        ("sagemaker", "CreateModel"),
        ("sagemaker", "CreateInferenceComponent"),
        ("application-autoscaling", "RegisterScalableTarget"),
    ],
)
def test_a_refusal_says_that_what_was_made_is_kept_and_how_to_delete_it(
    deploy: Deploy, service: str, operation: str
) -> None:
    """From CreateInferenceComponent on, the endpoint is in service and its instances are billed."""
    deploy.recorded()
    refusal = {"service": service, "operation": operation, "code": "AccessDeniedException", "times": 99}
    deploy.aws.scenario(errors=[refusal])
    output = deploy(deploy.directory, "--set", "deploy.scale_to_zero=true", status=2)
    assert "AccessDeniedException" in output
    assert "; what was created is kept and may cost money; " in output
    assert output.endswith(f"to delete it: {deploy.delete_command}\n")
    assert not deploy.nothing_left()
    deploy(*shlex.split(deploy.delete_command)[2:], "--yes")
    assert deploy.nothing_left()
