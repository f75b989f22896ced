"""The steps of the first day, and what each costs at most. Pure: nothing is asked of AWS.

Prices: on demand, in us-west-2, in US dollars an hour. They were not read from AWS: some are of others' tables of
November 2026, those of c7i, c5, trn1 and of what surrounds a cluster are estimates, EC2's prices with SageMaker's usual
surcharge. They do not count taxes, volumes, S3 and CloudWatch: cents.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hyperpod_ft.config import run_file
from hyperpod_ft.errors import UserError, did_you_mean
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker.groups import groups
from hyperpod_ft.sagemaker.resources import TrainingResources

PRICES_OF = "estimated on-demand prices of us-west-2, November 2026"
REGION = "us-west-2"
CPUS, CONTROLLER = "c7i.xlarge", "c5.xlarge"
_PRICES = {
    "training": {CPUS: 0.22, "g5.8xlarge": 3.06, "trn1.32xlarge": 24.78},
    "endpoint": {"g5.xlarge": 1.41},
    "cluster": {CONTROLLER: 0.21},
}
_AROUND_A_CLUSTER = 0.31  # FSx for Lustre with 1.2 TiB at 125 MB/s/TiB, a NAT gateway, its address
_DELETION_MINUTES = {"training": 5, "endpoint": 30, "cluster": 60 + 60}  # until nothing is billed; with its stack
_UNKNOWN = TrainingResources(REGION, "arn:aws:iam::123456789012:role/first-day", "first-day")


@dataclass(frozen=True)
class DayStep:
    """One step. `settings`: of a training, `KEY=VALUE` for recipe quickstart. `needs`: the step whose model it uses."""

    name: str
    shows: str
    kind: Literal["training", "endpoint", "cluster"]
    instance_type: str  # without `ml.`; of a cluster, that of the worker
    minutes: float  # then the step has failed
    settings: tuple[str, ...] = ()
    needs: str = ""


_ONE_RANK_A_DEVICE = ("training.precision=bf16", "parallelism.ranks_per_node=null")
STEPS = (
    DayStep("cpu", "role and bucket; a training as three jobs on CPUs", "training", CPUS, 120, ("cluster.nodes=1",)),
    DayStep("cluster", "a HyperPod cluster comes up; `cluster ssh` runs a Slurm job", "cluster", "c5.xlarge", 90),
    DayStep("endpoint", "an endpoint answers as the model of step cpu", "endpoint", "g5.xlarge", 60, needs="cpu"),
    DayStep(
        *("gpus", "NCCL between two hosts, one GPU each", "training", "g5.8xlarge", 120),
        (*_ONE_RANK_A_DEVICE, "parallelism.tensor_parallel=1", "training.max_steps=50"),
    ),
    DayStep(
        *("trainium", "engine neuron compiles and trains", "training", "trn1.32xlarge", 120),
        (
            *("engine=neuron", "env.sdk=2.26.1", "cluster.nodes=1", *_ONE_RANK_A_DEVICE),
            *("parallelism.tensor_parallel=2", "training.max_steps=20"),
        ),
    ),
)


def chosen(names: Sequence[str], steps: Sequence[DayStep] = STEPS) -> list[DayStep]:
    """The steps of these names, with what they need, cheapest first. Raises UserError for an unknown name."""
    known = {step.name: step for step in steps}
    for name in names:
        if name not in known:
            raise UserError(f"{name}: no such step{did_you_mean(name, known)}", f"steps: {', '.join(known)}")
    wanted = {*names, *(known[name].needs for name in names)}
    return [step for step in steps if step.name in wanted]


def run_of(step: DayStep, made: TrainingResources, root: Path) -> Run:
    """The run of a training step, with the name of the directory `root`, where it is."""
    section = f"{{region: {made.region}, role: '{made.role_arn}', store: 's3://{made.bucket}/first-day'"
    settings = (
        *(f"name={root.name}", f"cluster.root={root}", f"cluster.instance_type={step.instance_type}"),
        *("cluster.time_limit='00:20:00'", "cluster.cpu_time_limit='00:15:00'", "cluster.max_restarts=0"),
        *("env.python=null", f"sagemaker={section}, cpu_instance_type: {CPUS}, volume_gb: 50, max_wait: '00:30:00'}}"),
    )
    return Run.of(run_file.load(run_file.find("quickstart"), (*settings, *step.settings)))


def at_most(step: DayStep) -> float:
    """What a step costs at most, in US dollars: every instance until its limit, and until it is deleted.

    A training's limits are those of its jobs, without one that continues another: the step then ends.
    """
    prices, more = _PRICES[step.kind], _DELETION_MINUTES[step.kind]
    if step.kind == "training":
        run = run_of(step, _UNKNOWN, Path("/first-day"))
        hours = [(group, (group.seconds / 60 + more) / 60) for group in groups(run.plan.stages)]
        return sum(group.nodes * prices[group.instance_type(run)] * each for group, each in hours)
    around = prices[CONTROLLER] + _AROUND_A_CLUSTER if step.kind == "cluster" else 0.0
    return (prices[step.instance_type] + around) * (step.minutes + more) / 60


def require_affordable(steps: Iterable[DayStep], limit: float | None) -> float:
    """What the steps cost at most, together. Raises UserError if that is more than the limit."""
    total = sum(at_most(step) for step in steps)
    if limit is not None and not total <= limit:  # also for NaN
        raise UserError(
            f"--spend-at-most {limit:g}: the steps cost up to ${total:.2f}; nothing was created",
            "leave some out, or raise it",
        )
    return total
