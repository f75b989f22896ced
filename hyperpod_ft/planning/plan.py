"""Plan: the stages of a run with their needs, resources and fingerprints. A pure function of RunConfig."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from hyperpod_ft.config.fields import time_limit_seconds
from hyperpod_ft.config.run_config import RunConfig, StageName
from hyperpod_ft.digests import text_sha256
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.continued import OF_ADAPTER
from hyperpod_ft.planning.engine_rules import rules_of
from hyperpod_ft.planning.layout import Degrees
from hyperpod_ft.planning.parallelism import check_fewer_nodes, degrees_of
from hyperpod_ft.planning.pins import EVALUATION_ENVIRONMENT, requirements

_NOTICE_SECONDS = 300


@dataclass(frozen=True)
class Resources:
    """The resources that one job requests from Slurm."""

    nodes: int
    cpus: int | None  # None: the whole node
    partition: str | None
    time_limit: str

    @property
    def exclusive(self) -> bool:
        return self.cpus is None

    @property
    def notice_seconds(self) -> int:
        """How long before its time limit a job is signalled to save: 5 minutes, or a tenth of it if less."""
        return min(_NOTICE_SECONDS, time_limit_seconds(self.time_limit) // 10)


@dataclass(frozen=True)
class StagePlan:
    """One stage. The outputs of `shared` stages are used by other runs too."""

    name: StageName
    needs: tuple[StageName, ...]
    fingerprint: str
    shared: bool
    starts_ranks: bool
    resources: Resources


@dataclass(frozen=True)
class Plan:
    """The stages of a run, each after those it needs, and the degrees of parallelism."""

    stages: tuple[StagePlan, ...]
    degrees: Degrees

    def __getitem__(self, name: str) -> StagePlan:
        return {str(stage.name): stage for stage in self.stages}[name]

    def __contains__(self, name: object) -> bool:
        return any(stage.name == name for stage in self.stages)

    def require(self, name: str) -> None:
        """Raise UserError unless there is a stage of this name."""
        if name not in self:
            known = ", ".join(stage.name for stage in self.stages)
            raise UserError(f"no stage {name!r} in this run", f"its stages: {known}")

    @property
    def run_id(self) -> str:
        """Configurations with the same training are the same run; the stages after it may differ."""
        return self["train"].fingerprint[:12]

    @property
    def model_stage(self) -> StageName:
        """The stage that makes the final Hugging Face model."""
        return "merge" if "merge" in self else "consolidate"

    def following(self, name: str) -> tuple[StagePlan, ...]:
        """The stage and all later ones."""
        names = [stage.name for stage in self.stages]
        return self.stages[names.index(self[name].name) :]

    def needing(self, name: str) -> list[str]:
        """A stage, and those that need it, directly or through others."""
        found = [name]
        for stage in self.stages:
            if not set(found).isdisjoint(stage.needs):
                found.append(stage.name)
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "degrees": asdict(self.degrees)
            | {"world_size": self.degrees.world_size, "data_parallel": self.degrees.data_parallel},
            "stages": [asdict(stage) for stage in self.stages],
        }


@dataclass(frozen=True)
class _Definition:
    """The fixed properties of a stage.

    Raise `version` when the same inputs now give different outputs, as when a default changes that `depends_on` leaves
    out: tests/unit/planning/test_fingerprints.py has them.
    """

    version: int
    needs: tuple[StageName, ...]
    depends_on: Callable[[RunConfig, Degrees], dict[str, Any]]
    # whether a run has the stage
    applies: Callable[[RunConfig], bool] = lambda _: True
    shared: bool = False
    starts_ranks: bool = False
    # whether it also needs the final model, whichever stage makes it, and nothing that the model was made of
    asks_model: bool = False
    accelerated: bool = False
    # the number of CPUs it can use when it runs on CPUs; None: all that it gets
    cpus: int | None = None
    # its fingerprint does not include those of the stages it needs
    self_contained: bool = False
    # its fingerprint is part of those of the stages that need it
    inherited: bool = True


# Settings that change no result, only how it is made, and what is written or watched.
_RESULT_UNCHANGED = {
    "dataset.workers",
    *("training.log_every_steps", "training.save_every_steps", "training.keep_checkpoints", "training.async_save"),
    "training.memory_checkpoint_every_steps",
    *("training.save_only_model", "training.sanity_steps", "training.sanity_margin"),
    "training.validate_rouge_rows",
    *("neuron.xser", "neuron.precompile_steps"),
    *("eval.python", "eval.include_path"),  # eval.include_revision is the digest of its content
}
# Settings that a small model has in its own way.
_CERTIFICATE_UNCHANGED = {
    *("model.new_tokens", "model.new_special_tokens"),
    *("lora.r", "lora.alpha", "lora.dropout", "lora.plus_ratio", "lora.quantization"),
}
# Settings that say where and how fast a training runs: they change its results by rounding alone, as degrees and
# sharding do. The two numbers of rows count as their product, the rows of a step.
_PLACE = {
    *("cluster.instance_type", "training.micro_batch_size", "training.gradient_accumulation_steps"),
    *("training.compile", "training.activation_checkpointing", "training.activation_checkpointing_every"),
    "training.activation_offload",
}
# Settings that change no compiled graph.
_GRAPHS_UNCHANGED = {
    *("training.epochs", "training.max_steps", "training.learning_rate", "training.schedule", "training.warmup_share"),
}


def _settings(config: RunConfig, *chosen: str) -> dict[str, Any]:
    """What these sections or keys of a run file change in results: those that differ from their defaults.

    A new key, at its default, changes no fingerprint.
    """
    given = config.differing().items()
    # an adapter that training continues has these, whether the run file repeats them or not
    repeated = {f"lora.{key}" for key in OF_ADAPTER} if config.model.adapter else set()
    return {
        key: value
        for key, value in given
        if key not in _RESULT_UNCHANGED | repeated and (key in chosen or key.partition(".")[0] in chosen)
    }


def _fetched(config: RunConfig) -> dict[str, Any]:
    """What stage download fetches: the sources, without what is done with their rows."""
    parts, teacher = config.dataset.parts, ("teacher.source", "teacher.revision")
    listed = [
        part.dataset.model_dump(mode="json", include={"source", "revision", "files"}, exclude_defaults=True)
        | {"split": part.dataset.split_name}
        for part in parts
        if part.key != "dataset"
    ]
    return {
        **_settings(config, "model", "dataset.source", "dataset.revision", "dataset.files", *teacher),
        "split": parts[0].dataset.split_name,
        **({"sources": listed} if listed else {}),
        **({"made": "score"} if config.training.objective == "reward" else {}),
    }


def _training(config: RunConfig, degrees: Degrees) -> dict[str, Any]:
    """What is learned; also where, if the engine's rules say that the training cannot continue elsewhere."""
    here = _training_here(config, degrees)
    if not rules_of(config.engine).continues_elsewhere(config):
        return here
    learned = {key: value for key, value in here.items() if key not in _PLACE | {"degrees"}}
    return learned | {"rows_per_step": config.rows_per_step(degrees.data_parallel)}


def _training_here(config: RunConfig, degrees: Degrees) -> dict[str, Any]:
    """What is learned, and where."""
    adapters = ("lora",) if config.training.method == "lora" else ()
    # an engine's own section has its name
    sections = ("training", "dpo", "kto", "sampling", "teacher.beta", config.engine, *adapters)
    settings = _settings(config, *sections, "seed", "cluster.instance_type") | _rewards(config)
    # a degree of 1 divides nothing; who computes which experts changes no result, as with sharding
    changing = {name: size for name, size in asdict(degrees).items() if size > 1 and name != "expert_parallel"}
    return settings | {"degrees": changing}


def _rewards(config: RunConfig) -> dict[str, Any]:
    """The functions of section `reward`. A file of the user's is what is in it, wherever it is."""
    given = [
        reward.model_dump(mode="json", exclude_defaults=True, exclude={"timeout"}) | {"function": reward.function_name}
        for reward in config.reward
    ]
    return {"reward": given} if given else {}


def _graphs(config: RunConfig, degrees: Degrees) -> dict[str, Any]:
    """The inputs of the compiled graphs: shapes and operations, but not the data or the learning rate."""
    trained = _training_here(config, degrees)
    divided = ("parallelism.sharding", "parallelism.shard_ranks", "parallelism.sequence_parallel")
    return {
        **{key: value for key, value in trained.items() if key not in _GRAPHS_UNCHANGED | {"seed"}},
        **_settings(config, "model", "dataset.max_length", *divided),
        "environment": rules_of(config.engine).graph_settings(config),
        "packages": _packages(config),
    }


def _certified(config: RunConfig, degrees: Degrees) -> dict[str, Any]:
    """What the certificate is of."""
    sections = ("model", "lora") if config.training.method == "lora" else ("model",)
    asked = ("training.method", "training.objective", "dataset.packing", "teacher.source", "teacher.revision")
    found = _settings(config, *sections, *asked)
    return {
        **{key: value for key, value in found.items() if key not in _CERTIFICATE_UNCHANGED},
        "divided": [
            degree > 1 for degree in (degrees.tensor_parallel, degrees.pipeline_parallel, degrees.context_parallel)
        ]
        + ["experts"] * (degrees.expert_parallel > 1),
        **rules_of(config.engine).certified_settings(config),
        "packages": _packages(config),
    }


def _packages(config: RunConfig) -> Any:
    packages = config.env.python or [requirements(rules_of(config.engine).environment_name(config))]
    return [config.env.container, packages] if config.env.container else packages


def _benchmarks(config: RunConfig, _: Degrees) -> dict[str, Any]:
    """What stage tasks installs and fetches."""
    assert config.eval is not None, "its stages exist only with this section"
    fetched = _settings(config, "eval.tasks", "eval.include_revision", "eval.allow_code_execution")
    return fetched | {"packages": config.eval.python or [requirements(EVALUATION_ENVIRONMENT), _packages(config)]}


def _has_evaluation(config: RunConfig) -> bool:
    return config.eval is not None


_STAGES: dict[StageName, _Definition] = {
    # not inherited: the interpreter's path and the environment's pins do not change the run; records name the versions
    "env": _Definition(1, (), lambda config, _: {"packages": _packages(config)}, shared=True, cpus=1, inherited=False),
    "download": _Definition(
        1,
        (),
        lambda config, _: _fetched(config),
        shared=True,
        cpus=2,
    ),
    # a stage of its own: runs that share rows differ in their adapters; not inherited: it changes no result
    "certify": _Definition(
        1,
        ("env", "download"),
        _certified,
        # of the types that engine trl trains with images, all that it would prove is known
        applies=lambda config: config.engine == "torch" or (config.engine == "trl" and not config.dataset.images),
        shared=True,
        cpus=1,
        self_contained=True,
        inherited=False,
    ),
    "dataset": _Definition(
        5,
        ("env", "download", "certify"),  # which says whether examples share rows
        lambda config, _: _settings(config, "dataset", "seed"),
        shared=True,
    ),
    # before the training: a function that fails is found in time
    "reward": _Definition(
        1,
        ("env", "dataset"),
        lambda config, _: _rewards(config),
        applies=lambda config: config.training.has_rewards,
        cpus=1,
        inherited=False,  # its inputs are among those of train
    ),
    # likewise: a name that the harness does not know is found in time
    "tasks": _Definition(
        1,
        ("env",),
        _benchmarks,
        applies=_has_evaluation,
        shared=True,
        cpus=2,
        inherited=False,  # its inputs, except the interpreter, are among those of eval
    ),
    "precompile": _Definition(
        1,
        ("env", "download", "dataset"),
        _graphs,
        applies=lambda config: rules_of(config.engine).precompiles(config),
        shared=True,
        starts_ranks=True,
        self_contained=True,
        inherited=False,  # its inputs, except the interpreter, are among those of train
    ),
    "train": _Definition(
        1, ("env", "download", "certify", "dataset", "reward", "precompile"), _training, starts_ranks=True
    ),
    # with method full, it writes the final model
    "consolidate": _Definition(
        2,
        ("env", "download", "train"),
        lambda config, _: _settings(config, "merge") if config.training.method == "full" else {},
        cpus=2,
    ),
    "merge": _Definition(
        1,
        ("env", "download", "consolidate"),
        lambda config, _: _settings(config, "merge"),
        # with method full, consolidate writes the final model: there is no adapter to merge
        applies=lambda config: config.training.method == "lora",
        cpus=2,
    ),
    "generate": _Definition(
        1,
        ("env", "download", "dataset"),
        # also an encoder-decoder's default: a run that was made before it is scored when submitted again
        lambda config, _: _settings(config, "generate") | ({"generate.rouge": True} if config.scores_rouge else {}),
        applies=lambda config: config.training.objective != "reward",  # it writes no answers
        asks_model=True,
        accelerated=True,
    ),
    "eval": _Definition(
        1,
        ("env", "download", "tasks"),
        lambda config, _: _settings(config, "eval"),
        asks_model=True,
        applies=_has_evaluation,
        accelerated=True,
    ),
}


def plan(config: RunConfig) -> Plan:
    """The plan of a resolved run file. Raises UserError when its degrees do not divide the ranks, of any node count."""
    degrees = degrees_of(config)
    check_fewer_nodes(config, degrees)
    chosen = {name: definition for name, definition in _STAGES.items() if definition.applies(config)}
    stages: list[StagePlan] = []
    fingerprints: dict[str, str] = {}
    for name, definition in chosen.items():
        model: list[StageName] = ["merge" if "merge" in chosen else "consolidate"] if definition.asks_model else []
        needs = tuple(need for need in (*definition.needs, *model) if need in chosen)
        inherited = [fingerprints[need] for need in needs if chosen[need].inherited and not definition.self_contained]
        fingerprints[name] = _fingerprint(
            name, definition.version, config.engine, definition.depends_on(config, degrees), inherited
        )
        stages.append(
            StagePlan(
                name,
                needs,
                fingerprints[name],
                definition.shared,
                definition.starts_ranks,
                _resources(config, name, definition, degrees),
            )
        )
    return Plan(tuple(stages), degrees)


def _fingerprint(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return text_sha256(text)[:16]


def _resources(config: RunConfig, name: StageName, definition: _Definition, degrees: Degrees) -> Resources:
    cluster, instance = config.cluster, config.instance
    if definition.starts_ranks:
        # Whole nodes if they have accelerators; otherwise one CPU per rank.
        cpus = None if instance.has_accelerators else degrees.ranks_per_node
        return Resources(cluster.nodes, cpus, cluster.partition, cluster.time_limit)
    if (
        definition.accelerated
        and instance.has_accelerators
        and rules_of(config.engine).generates_on_accelerators(config)
    ):
        return Resources(1, None, cluster.partition, cluster.cpu_time_limit)
    # consolidate and merge work at 1 GB/s on each CPU, as measured, faster than a volume; the others wait for pip or
    # the network. A job that requests more CPUs waits longer, and keeps others waiting
    useful = config.dataset.workers if name == "dataset" else definition.cpus
    cpus = min(cluster.cpus_per_cpu_stage, useful or cluster.cpus_per_cpu_stage)
    return Resources(
        1,
        min(cpus, 2) if instance.name == "local" else cpus,
        cluster.cpu_partition or cluster.partition,
        cluster.cpu_time_limit,
    )
