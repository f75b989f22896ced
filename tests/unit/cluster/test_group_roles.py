"""What a cluster's instance groups are for: by HyperPod's roles, or else by their names."""

import pytest

from hyperpod_ft.cluster import config as cluster_config
from hyperpod_ft.cluster.hyperpod.api import GroupRoles, GroupState, HyperPodCluster


def cluster(**roles: str) -> HyperPodCluster:
    """A cluster with these groups and the roles that HyperPod reports for them; `_` stands for `-`."""
    groups = tuple(GroupState(name.replace("_", "-"), "", 1, 1, "", "", role) for name, role in roles.items())
    return HyperPodCluster("c", "", "InService", "", groups, subnets=(), kubernetes=False)


def test_hyperpods_roles_count_whatever_the_names_are() -> None:
    reported = cluster(workers="Compute", head="Controller", controller_machine="Compute", door="Login")
    assert GroupRoles.of(reported, None) == GroupRoles("head", "door", ("workers", "controller-machine"))


def test_without_roles_the_usual_names() -> None:
    unnamed = cluster(workers="", controller_machine="", login_group="")
    assert GroupRoles.of(unnamed, None) == GroupRoles("controller-machine", "login-group", ("workers",))
    assert GroupRoles.of(cluster(workers="", head=""), None) == GroupRoles(None, None, ("workers", "head"))


def test_without_roles_the_names_of_the_cluster_file() -> None:
    config = cluster_config.load(
        cluster_config.example(), ("controller.name=head", "login={name: door, instance_type: ml.m5.large}")
    )
    found = GroupRoles.of(cluster(door="", controller_machine="", head=""), config)
    assert found == GroupRoles("head", "door", ("controller-machine",))


@pytest.mark.parametrize(("login", "entry"), [("door", "door"), (None, "head")])
def test_users_log_in_on_the_controller_where_no_group_is_for_that(login: str | None, entry: str) -> None:
    assert GroupRoles("head", login, ()).entry == entry
