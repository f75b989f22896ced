"""Which nodes are deleted when only their number is given."""

from dataclasses import replace

import pytest

from hyperpod_ft.cluster.controller import without_jobs
from hyperpod_ft.cluster.hyperpod.api import GroupState, Node
from hyperpod_ft.errors import UserError

STATES = {"ip-1": "idle", "ip-2": "allocated", "ip-3": "down", "ip-4": "idle", "ip-5": "planned", "ip-9": "idle"}


WORKERS = GroupState("workers", "ml.trn1.32xlarge", 6, 6, "", "", "Compute")


def node(number: int, group: str = "workers", status: str = "Running") -> Node:
    return Node(group, f"i-{number}", "ml.trn1.32xlarge", status, "", float(number), f"ip-{number}")


NODES = [*map(node, range(1, 7)), node(9, "others"), Node("workers", "", "ml.trn1.32xlarge", "Failure", "", 0.0, "")]


@pytest.mark.parametrize(("count", "chosen"), [(1, ["i-3"]), (2, ["i-3", "i-4"]), (3, ["i-3", "i-4", "i-1"])])
def test_unusable_nodes_go_before_idle_ones_and_new_before_old(count: int, chosen: list[str]) -> None:
    assert [one.instance_id for one in without_jobs(WORKERS, NODES, STATES, count)] == chosen


@pytest.mark.parametrize("status", ["ShuttingDown", "Pending", "SystemUpdating", "DeepHealthCheckInProgress"])
def test_nodes_that_are_going_or_not_ready_are_neither_chosen_nor_offered(status: str) -> None:
    nodes = [node(1), node(2), node(3, status=status), node(4, status="Failure")]
    assert [one.instance_id for one in without_jobs(WORKERS, nodes, STATES, 2)] == ["i-4", "i-1"]
    with pytest.raises(UserError, match=r"2 of its nodes run no job, not 3; .*may be killed: i-2 \(allocated\)$"):
        without_jobs(WORKERS, nodes, STATES, 3)


def test_nodes_with_jobs_are_named_and_none_is_chosen() -> None:
    """So is a node that is about to run a job, and one that Slurm does not know."""
    with pytest.raises(UserError) as raised:
        without_jobs(WORKERS, NODES, STATES, 4)
    assert "3 of its nodes run no job, not 4" in str(raised.value)
    assert "i-2 (allocated), i-5 (planned), i-6 (unknown to Slurm)" in str(raised.value)


def test_none_is_chosen_while_hyperpod_removes_others() -> None:
    """It may list them as Running for a while: the same ones would be chosen again."""
    with pytest.raises(UserError, match="HyperPod is removing 1 of its 6 nodes"):
        without_jobs(replace(WORKERS, target=5), NODES, STATES, 1)
