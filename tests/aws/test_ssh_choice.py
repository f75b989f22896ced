"""Which node of a cluster is meant."""

import pytest

from hyperpod_ft.cluster.hyperpod.api import GroupRoles
from hyperpod_ft.cluster.ssh import choice as reach
from hyperpod_ft.errors import UserError
from tests.aws.ssh_cluster import a_cluster, a_node


class TestWhichNode:
    def test_one_to_log_in_to_unless_another_is_named(self) -> None:
        cluster = a_cluster("w", "controller-machine", "login-group")
        there = [a_node("w", "i-1"), a_node("controller-machine", "i-2"), a_node("login-group", "i-3")]
        roles = GroupRoles.of(cluster, None)
        assert reach.chosen_node(cluster, there, roles, None, None).instance_id == "i-3"
        assert reach.chosen_node(cluster, there, roles, None, "w").instance_id == "i-1"
        assert reach.chosen_node(cluster, there, roles, "i-2", "w").instance_id == "i-2"

    def test_where_none_is_known_to_log_in_to_the_group_is_named(self) -> None:
        cluster, there = a_cluster("w", "head", roles=False), [a_node("head", "i-1")]
        with pytest.raises(UserError, match="--group with one of: w, head"):
            reach.chosen_node(cluster, there, GroupRoles.of(cluster, None), None, None)
        assert reach.chosen_node(cluster, there, GroupRoles.of(cluster, None), None, "head").instance_id == "i-1"

    def test_a_group_is_not_another_whose_name_begins_with_its_own(self) -> None:
        cluster = a_cluster("worker-group-10", "worker-group-1")
        there = [a_node("worker-group-10", "i-10"), a_node("worker-group-1", "i-1")]
        assert reach.in_group(cluster, there, "worker-group-1").instance_id == "i-1"

    def test_a_running_node_before_others(self) -> None:
        there = [a_node("w", "i-1", "Failure"), a_node("w", "i-2"), a_node("w", "i-3")]
        assert reach.in_group(a_cluster("w"), there, "w").instance_id == "i-2"

    def test_none_running_says_which_states_there_are(self) -> None:
        there = [a_node("w", "i-1", "Failure"), a_node("w", "", "Pending"), a_node("v", "i-3")]
        with pytest.raises(UserError, match=r"no node of w is Running \(1 Failure, 1 Pending\).*one of: v"):
            reach.in_group(a_cluster("w", "v"), there, "w")
        with pytest.raises(UserError, match="no node of w is Running"):
            reach.in_group(a_cluster("w", "v"), [], "w")

    def test_an_unknown_group(self) -> None:
        with pytest.raises(UserError, match=r"did you mean worker-group-1\?.*known: worker-group-1"):
            reach.in_group(a_cluster("worker-group-1"), [], "worker-group")

    def test_a_node_by_id_or_host_name(self) -> None:
        there = [a_node("w", "i-1", "ShuttingDown", message="bye"), a_node("w", "i-2", hostname="ip-10-1-2-3")]
        assert reach.by_name(a_cluster("w"), there, "i-2") == reach.by_name(a_cluster("w"), there, "ip-10-1-2-3")
        with pytest.raises(UserError, match="i-1 of w is ShuttingDown: bye"):
            reach.by_name(a_cluster("w"), there, "i-1")
