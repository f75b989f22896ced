"""The catalogue of instance types, against EC2's own description of them, of which moto has a copy."""

import gzip
import json
from importlib.resources import files
from typing import Any

import boto3
import pytest

from hyperpod_ft.config.instances import CATALOGUE, alternatives


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    compressed = files("moto").joinpath("ec2/resources/instance_types.json.gz").read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(compressed))
    return found


@pytest.mark.parametrize("name", sorted(set(CATALOGUE) - {"local"}))
def test_devices_memory_and_interfaces_are_ec2s(name: str, described: dict[str, Any]) -> None:
    instance, known = CATALOGUE[name], described[name]
    assert instance.efa == known["NetworkInfo"].get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)
    if instance.device == "cuda":
        (gpus,) = known["GpuInfo"]["Gpus"]
        assert instance.devices == instance.ranks == gpus["Count"]
        assert instance.device_gib == gpus["MemoryInfo"]["SizeInMiB"] // 1024


def test_hyperpod_or_training_jobs_have_every_type() -> None:
    model = boto3.Session(region_name="us-east-1").client("sagemaker").meta.service_model
    cluster, training = (
        {name.removeprefix("ml.") for name in model.shape_for(shape).enum}
        for shape in ("ClusterInstanceType", "TrainingInstanceType")
    )
    assert set(CATALOGUE) - {"local"} <= cluster | training
    assert set(CATALOGUE) - training == {"local", "trn2.3xlarge"}
    assert {name for name, known in CATALOGUE.items() if known.has_accelerators} <= cluster
    assert not {name for name in cluster if name.startswith("trn3")}, "the catalogue can have them now"


@pytest.mark.parametrize("family", sorted({name.partition(".")[0] for name in CATALOGUE}))
def test_an_error_about_a_family_lists_types_that_are_accepted(family: str) -> None:
    listed = alternatives(family).removeprefix("known: ").split(", ")
    assert listed and set(listed) <= CATALOGUE.keys() and all(name.partition(".")[0] == family for name in listed)
    assert alternatives(f"{family}.wrong") == alternatives(family)
    assert family in alternatives("trn9") and "p5.48xlarge" in alternatives("trn9")
