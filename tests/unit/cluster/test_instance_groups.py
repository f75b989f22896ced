"""Operations on several nodes, which HyperPod may refuse for some of them."""

from typing import Any

import pytest

from hyperpod_ft.cluster.hyperpod import instance_groups
from hyperpod_ft.cluster.hyperpod.api import Node
from hyperpod_ft.errors import UserError

NODES = [Node("workers", f"i-{number}", "ml.trn1.32xlarge", "Running", "", 0.0, "") for number in range(60)]


class Client:
    """Records requests; gives the next answer, or none of the nodes a refusal."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers, self.requests = list(answers), []

    def __getattr__(self, name: str) -> Any:
        def operation(**request: Any) -> dict[str, Any]:
            self.requests.append({"operation": name, **request})
            return self.answers.pop(0) if self.answers else {"Failed": []}

        return operation


def test_requests_are_no_larger_than_hyperpod_accepts() -> None:
    client = Client()
    instance_groups.reboot_nodes(client, "c", NODES)
    instance_groups.delete_nodes(client, "c", NODES)
    instance_groups.add_instances(client, "c", "workers", 60)
    assert [len(request["NodeIds"]) for request in client.requests[:4]] == [25, 25, 10, 60]
    added = [request["NodesToAdd"] for request in client.requests[4:]]
    assert [wanted["IncrementTargetCountBy"] for (wanted,) in added] == [50, 10]


def test_an_addition_that_botocore_sends_again_counts_once() -> None:
    """Each request has a token of its own: with the same one, HyperPod would take the second for the first."""
    client = Client()
    instance_groups.add_instances(client, "c", "workers", 60)
    first, second = (request["ClientToken"] for request in client.requests)
    assert first != second


@pytest.mark.parametrize(
    ("operation", "failed"),
    [
        (instance_groups.replace_nodes, {"NodeId": "i-1", "ErrorCode": "InstanceIdInUse", "Message": "busy"}),
        (instance_groups.delete_nodes, {"NodeId": "i-1", "Code": "InstanceIdInUse", "Message": "busy"}),
    ],
)
def test_every_refused_node_is_named(operation: Any, failed: dict[str, str]) -> None:
    client = Client({"Failed": [failed]}, {"Failed": [{**failed, "NodeId": "i-30"}]})
    with pytest.raises(UserError, match=r"i-1 \(InstanceIdInUse: busy\)"):
        operation(client, "c", NODES)


def test_an_addition_that_is_refused_is_an_error() -> None:
    failed = {"InstanceGroupName": "workers", "ErrorCode": "InvalidInstanceGroupStatus", "FailedCount": 2}
    with pytest.raises(UserError, match=r"workers: instances not added: 2 \(InvalidInstanceGroupStatus\)"):
        instance_groups.add_instances(Client({"Failed": [failed]}), "c", "workers", 2)
