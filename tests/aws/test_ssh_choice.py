"""Which node of a cluster is meant."""

import pytest

from hyperpod_ft.cluster.hyperpod.api import GroupRoles
from hyperpod_ft.cluster.ssh import connect
from hyperpod_ft.errors import UserError
from tests.aws.ssh_cluster import a_cluster, a_node


class TestWhichNode:
    def test_none_running_says_which_states_there_are(self) -> None:
        there = [a_node("w", "i-1", "Failure"), a_node("w", "", "Pending"), a_node("v", "i-3")]
        with pytest.raises(UserError, match=r"no node of w is Running \(1 Failure, 1 Pending\).*one of: v"):
            connect.in_group(a_cluster("w", "v"), there, "w")
        with pytest.raises(UserError, match="no node of w is Running"):
            connect.in_group(a_cluster("w", "v"), [], "w")
        with pytest.raises(UserError, match="i-1 of w is Failure: broken"):
            connect.by_name(a_cluster("w"), [a_node("w", "i-1", "Failure", message="broken")], "i-1")

    def test_where_none_is_known_to_log_in_to_the_group_is_named(self) -> None:
        cluster = a_cluster("w", "head", roles=False)
        with pytest.raises(UserError, match="--group with one of: w, head"):
            connect.chosen_node(cluster, [a_node("head", "i-1")], GroupRoles.of(cluster, None), None, None)

    def test_an_unknown_group(self) -> None:
        with pytest.raises(UserError, match=r"did you mean worker-group-1\?.*known: worker-group-1"):
            connect.in_group(a_cluster("worker-group-1"), [], "worker-group")
