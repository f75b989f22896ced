"""Quotas: of clusters, instances, volumes and networks."""

from typing import Any

import pytest

from hyperpod_ft.cluster.validation.validate import validate_account
from tests.aws.account_place import Place, check, clients, cluster, config, of, only, own_client, workers
from tests.aws.conftest import Aws


def test_a_quota_that_is_too_small_names_itself_and_what_to_ask_for(aws: Aws) -> None:
    aws.scenario(quotas={"ml.trn1.32xlarge for cluster usage": 1})
    finding = only(check(aws).findings)
    assert (finding.verdict, finding.name) == ("error", "workers.0.count")
    assert "quota `ml.trn1.32xlarge for cluster usage` is 1; 2 are needed" in finding.found
    assert "request-service-quota-increase --region us-west-2" in finding.remedy
    assert "--quota-code L-" in finding.remedy
    assert finding.remedy.endswith("--desired-value 2")


def test_what_other_clusters_have_counts_and_what_this_one_has_does_not(place: Place) -> None:
    name = "ml.trn1.32xlarge for cluster usage"
    place.aws.scenario(quotas={name: 2})
    cluster(place, "other", 1)
    finding = only(of(place.check(), "workers.0.count"))
    assert "3 are needed, 1 of them" in finding.found
    place.aws.scenario(quotas={name: 3})
    cluster(place, "demo", 2)
    assert [f for f in place.check().findings if f.verdict == "error"] == []


def test_the_quotas_of_whole_clusters_and_of_volumes(aws: Aws) -> None:
    aws.scenario(quotas={"Maximum number of instances allowed per SageMaker HyperPod cluster": 2})
    finding = only(check(aws).findings)
    assert (finding.name, finding.verdict) == ("workers", "error")
    aws.scenario(
        quotas={
            "Maximum number of instances allowed per SageMaker HyperPod cluster": 20,
            "Total number of instances allowed across SageMaker HyperPod clusters": 2,
        }
    )
    assert "across SageMaker HyperPod clusters" in only(check(aws).findings).found


def test_the_quota_of_volumes(aws: Aws) -> None:
    aws.scenario(quotas={"Maximum size of EBS volume in GB for a SageMaker HyperPod cluster instance": 500})
    assert check(aws).findings == ()
    finding = only(check(aws, **workers(volume_gb=501)).findings)
    assert (finding.name, finding.verdict) == ("workers.0.volume_gb", "error")


@pytest.mark.parametrize(
    ("name", "limit", "field"),
    [
        ("VPCs per Region", 1, "name"),  # the region's default VPC counts as one
        ("Internet gateways per Region", 0, "name"),
        ("EC2-VPC Elastic IPs", 0, "name"),
        ("Network interfaces per Region", 16, "workers"),
    ],
)
def test_quotas_of_the_network(aws: Aws, name: str, limit: float, field: str) -> None:
    aws.scenario(quotas={name: limit})
    finding = only(check(aws).findings)
    assert (finding.name, finding.verdict) == (field, "error")
    assert f"quota `{name}` is {limit}; {limit + 1} are needed" in finding.found
    aws.scenario(quotas={name: limit + 1})
    assert check(aws).findings == ()


def test_existing_networks_need_no_quota_but_that_of_interfaces(place: Place) -> None:
    place.aws.scenario(quotas={"VPCs per Region": 0, "Internet gateways per Region": 0, "EC2-VPC Elastic IPs": 0})
    assert place.check().findings == ()
    place.aws.scenario(quotas={"Network interfaces per Region": 17})
    finding = only(place.check().findings)
    assert "in use" in finding.found


def test_quotas_that_aws_does_not_tell_are_warnings(aws: Aws) -> None:
    """The stand-in reports all quotas: some are removed from its answer."""
    client = own_client(aws, "service-quotas")

    def change(parsed: dict[str, Any], **_: Any) -> None:
        hidden = ("ml.trn1.32xlarge for cluster usage", "VPCs per Region")
        parsed["Quotas"] = [quota for quota in parsed["Quotas"] if quota["QuotaName"] not in hidden]

    client.meta.events.register("after-call.service-quotas", change)
    checked = validate_account(config(), clients(aws, **{"service-quotas": client}))
    assert [(f.verdict, f.name) for f in checked.findings] == [
        ("warning", "workers.0.instance_type"),
        ("warning", "name"),
    ]
