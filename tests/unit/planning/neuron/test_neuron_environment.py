"""The environment of the jobs that compile and train on Neuron devices."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.neuron.rules import variables
from hyperpod_ft.runs.run import Run
from tests.conftest import MakeRun

CACHE = Path("/fsx/hyperpod-ft/neuron-cache/0123456789abcdef")


def neuron(make_run: MakeRun, **overrides: Any) -> Run:
    return make_run(
        **{
            "engine": "neuron",
            "cluster__instance_type": "trn1.32xlarge",
            "parallelism": {"tensor_parallel": 4},
            **overrides,
        }
    )


def test_logical_cores_agree_with_the_compiler(make_run: MakeRun) -> None:
    found = variables(neuron(make_run, cluster__instance_type="trn2.48xlarge").config, CACHE)
    assert "--lnc=2" in found["NEURON_CC_FLAGS"].split()
    own = {"cluster__instance_type": "trn2.48xlarge", "cluster__environment": {"NEURON_CC_FLAGS": "-O1"}}
    assert variables(neuron(make_run, **own).config, CACHE)["NEURON_CC_FLAGS"] == f"-O1 --lnc=2 --cache_dir={CACHE}"
    assert found["NEURON_LOGICAL_NC_CONFIG"] == found["NEURON_RT_VIRTUAL_CORE_SIZE"] == "2"


def test_several_nodes_talk_over_efa(make_run: MakeRun) -> None:
    found = variables(neuron(make_run, cluster__nodes=2).config, CACHE)
    assert {name: value for name, value in found.items() if name.startswith("FI_")} == {
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_DEVICE_RDMA": "1",
        "FI_EFA_FORK_SAFE": "1",
    }


@pytest.mark.parametrize(
    "overrides", [{"neuron": {"stochastic_rounding": False}}, {"training__precision": "fp32"}], ids=["off", "fp32"]
)
def test_rounding_is_stochastic_only_when_asked_for_in_bf16(make_run: MakeRun, overrides: dict[str, Any]) -> None:
    assert variables(neuron(make_run, **overrides).config, CACHE)["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == "0"


def test_what_the_user_sets_stays(make_run: MakeRun) -> None:
    run = neuron(make_run, cluster__environment={"NEURON_CC_FLAGS": "-O1", "MALLOC_ARENA_MAX": "8"})
    found = variables(run.config, CACHE)
    assert found["NEURON_CC_FLAGS"] == f"-O1 --cache_dir={CACHE}"
    assert "MALLOC_ARENA_MAX" not in found


def test_optimum_neuron_reads_the_whole_path_of_the_cache(make_run: MakeRun) -> None:
    """With the expression of optimum-neuron 0.4.5, utils/cache_utils.py, get_neuron_cache_path."""
    run = neuron(make_run)
    flags = variables(run.config, run.paths.neuron_cache)["NEURON_CC_FLAGS"]
    match = re.search(r"--cache_dir=([\w\/-]+)", flags)
    assert match is not None
    assert match[1] == str(run.paths.neuron_cache) == shlex.split(flags)[-1].removeprefix("--cache_dir=")


@pytest.mark.parametrize("root", ["/fsx/v1.2", "/fsx/a:b", "/fsx/two words", "/fsx/größe"])
def test_a_root_that_would_be_cut_off_is_refused(make_run: MakeRun, root: str) -> None:
    with pytest.raises(UserError, match=r"cluster\.root: .*; choose another root"):
        neuron(make_run, cluster__root=root)
    make_run(cluster__root=root)


@pytest.mark.parametrize(
    "environment",
    [{"NEURON_COMPILE_CACHE_URL": "/x"}, {"NEURON_CC_FLAGS": "--cache_dir=/x"}, {"NEURON_CC_FLAGS": "--no-cache"}],
)
def test_the_cache_is_the_kits_to_choose(make_run: MakeRun, environment: dict[str, str]) -> None:
    with pytest.raises(UserError, match="the kit sets the directory of the Neuron compile cache"):
        neuron(make_run, cluster__environment=environment)


def test_how_cores_are_grouped_is_the_kits(make_run: MakeRun) -> None:
    for given in ({"NEURON_LOGICAL_NC_CONFIG": "1"}, {"NEURON_CC_FLAGS": "-O1 --lnc=1"}):
        with pytest.raises(UserError, match=r"cluster\.environment: .* \(LNC\)"):
            neuron(make_run, cluster__environment=given)
