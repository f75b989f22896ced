"""Requests against botocore's models: what AWS would refuse, without AWS."""

import copy

import pytest

pytest.importorskip("botocore")

from hyperpod_ft.aws.checks.service_model import check_request, compiled_pattern, model

ROLE = "arn:aws:iam::123456789012:role/hyperpod"
GROUP = {
    "InstanceGroupName": "worker-group-1",
    "InstanceType": "ml.trn1.32xlarge",
    "InstanceCount": 2,
    "ExecutionRole": ROLE,
    "LifeCycleConfig": {"SourceS3Uri": "s3://sagemaker-x/lifecycle", "OnCreate": "on_create.sh"},
    "InstanceStorageConfigs": [{"EbsVolumeConfig": {"VolumeSizeInGB": 500}}],
}
REQUEST = {
    "ClusterName": "demo",
    "InstanceGroups": [GROUP],
    "VpcConfig": {"SecurityGroupIds": ["sg-0123456789abcdef0"], "Subnets": ["subnet-0123456789abcdef0"]},
    "Tags": [{"Key": "team", "Value": "größe 7"}],
}

# (path, value, message)
WRONG = [
    (("ClusterName",), "two__words", "does not match [a-zA-Z0-9]"),
    (("ClusterName",), "a" * 64, "has 64 characters; at most 63"),
    (("ClusterName",), "demo\n", "does not match"),
    (("ClusterName",), 7, "is 7, not a string"),
    (("ClusterName",), None, "is null"),
    (("InstanceGroups",), [], "0 elements; at least 1"),
    (("InstanceGroups",), {}, "is {}, not a list"),
    (("InstanceGroups", 0, "InstanceType"), "ml.trn1.32xlrage", "did you mean ml.trn1.32xlarge?"),
    (("InstanceGroups", 0, "InstanceType"), "?", "none of AWS's "),
    (("InstanceGroups", 0, "InstanceCount"), -1, "is -1; at least 0"),
    (("InstanceGroups", 0, "InstanceCount"), 6759, "is 6759; at most 6758"),
    (("InstanceGroups", 0, "InstanceCount"), True, "is True, not an integer"),
    (("InstanceGroups", 0, "InstanceCount"), 1.5, "not an integer"),
    (("InstanceGroups", 0, "LifeCycleConfig"), {"SourceS3URI": "s3://x"}, "did you mean SourceS3Uri?"),
    (("InstanceGroups", 0, "LifeCycleConfig", "SourceS3Uri"), "s3:/x", "does not match (https|s3)"),
    (("InstanceGroups", 0, "InstanceStorageConfigs", 0), {}, "exactly one of EbsVolumeConfig, FsxLustreConfig"),
    (
        ("InstanceGroups", 0, "InstanceStorageConfigs", 0),
        {"EbsVolumeConfig": {"VolumeSizeInGB": 1}, "FsxOpenZfsConfig": {"DnsName": "fs-0123456789.fsx.aws"}},
        "EbsVolumeConfig, FsxOpenZfsConfig",
    ),
    (("InstanceGroups", 0, "SlurmConfig"), {"NodeType": "Worker"}, "known: Controller, Login, Compute"),
    (("InstanceGroups", 0, "OnStartDeepHealthChecks"), ["Stress"], "InstanceStress"),
    (("VpcConfig", "SecurityGroupIds"), ["sg"] * 6, "6 elements; at most 5"),
]


def changed(path: tuple[str | int, ...], value: object) -> dict:
    request = copy.deepcopy(REQUEST)
    at = request
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    return request


def written(path: tuple[str | int, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


@pytest.mark.parametrize(("path", "value", "said"), WRONG)
def test_each_wrong_value_is_reported_with_its_place(path, value, said):
    (violation,) = check_request("sagemaker", "CreateCluster", changed(path, value))
    assert violation.path.startswith(written(path)), violation
    assert said in violation.problem
    assert len(violation.problem) < 400  # never all of 209 values


def test_a_right_request_passes_and_all_problems_come_at_once():
    assert check_request("sagemaker", "CreateCluster", REQUEST) == []
    request = changed(("ClusterName",), "-")
    del request["InstanceGroups"][0]["ExecutionRole"]
    request["NodeRecovery"] = "Sometimes"
    assert [v.path for v in check_request("sagemaker", "CreateCluster", request)] == [
        "ClusterName",
        "InstanceGroups[0].ExecutionRole",
        "NodeRecovery",
    ]


def test_maps_and_timestamps():
    labels = {"KubernetesConfig": {"Labels": {"team": "a", "bad key": "b"}}}
    (violation,) = check_request("sagemaker", "CreateCluster", {**REQUEST, "InstanceGroups": [{**GROUP, **labels}]})
    assert violation.path == "InstanceGroups[0].KubernetesConfig.Labels.bad key"
    assert check_request("sagemaker", "ListClusters", {"CreationTimeAfter": "2027-01-01", "MaxResults": 5}) == []


def test_other_services_with_tokens_that_botocore_fills_in():
    request = {"FileSystemType": "LUSTRE", "SubnetIds": ["subnet-0123456789abcdef0"], "StorageCapacity": 1200}
    assert check_request("fsx", "CreateFileSystem", request) == []
    (violation,) = check_request("fsx", "CreateFileSystem", {**request, "FileSystemType": "LUSTER"})
    assert "LUSTRE" in violation.problem


@pytest.mark.parametrize(
    ("pattern", "matches", "differs"),
    [
        (r"([\p{L}\p{Z}\p{N}_.:/=+\-@]*)", "höhe\u00a03@x", "a*b"),
        (r"([\p{L}\p{Z}\p{N}_.:/=+\-@]*)", "größe ٣", "a\tb"),
        (r"\d+", "12", "١٢"),  # Java's \d matches ASCII digits only
    ],
)
def test_patterns_are_read_as_java_reads_them(pattern, matches, differs):
    compiled = compiled_pattern(pattern)
    assert compiled
    assert compiled.fullmatch(matches)
    assert not compiled.fullmatch(differs)


def test_a_pattern_that_python_cannot_read_is_left_to_aws():
    assert compiled_pattern(r"^(?i)(true|false)$") is None


@pytest.mark.parametrize(
    ("service", "operation"),
    [("sagemaker", "CreateCluster"), ("sagemaker", "UpdateCluster"), ("cloudformation", "CreateStack")],
)
def test_every_pattern_of_the_requests_in_use_is_read(service, operation):
    patterns = set(patterns_below(model(service).operation_model(operation).input_shape))
    assert patterns
    assert [pattern for pattern in patterns if compiled_pattern(pattern) is None] == []


def patterns_below(shape, seen=frozenset()):
    if shape.name in seen:
        return
    if pattern := shape.metadata.get("pattern"):
        yield pattern
    members = [*getattr(shape, "members", {}).values()] if shape.type_name == "structure" else []
    members += [shape.member] if shape.type_name == "list" else []
    members += [shape.key, shape.value] if shape.type_name == "map" else []
    for member in members:
        yield from patterns_below(member, seen | {shape.name})
