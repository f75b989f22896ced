"""RunConfig: a run file. Unknown keys are refused, values are checked, and the result is frozen.

Its keys are in sections/. `docs/run-file.md` is generated from them.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hyperpod_ft.config.fields import NonNegativeInt, Section, flattened, matches
from hyperpod_ft.config.instances import CATALOGUE, Instance
from hyperpod_ft.config.sections.cluster import Cluster, PythonEnvironment, Tracking
from hyperpod_ft.config.sections.data import Data
from hyperpod_ft.config.sections.inputs import Model
from hyperpod_ft.config.sections.parallelism import Neuron, Parallelism
from hyperpod_ft.config.sections.results import Eval, Generate, Merge
from hyperpod_ft.config.sections.rewards import Grpo, Reward
from hyperpod_ft.config.sections.sagemaker import MAX_LORA_RANK, Deploy, SageMaker
from hyperpod_ft.config.sections.training import Dpo, Kto, Lora, Training
from hyperpod_ft.errors import UserError

EngineName = Literal["torch", "neuron", "trl"]
StageName = Literal[
    "env",
    "download",
    "certify",
    "dataset",
    "reward",
    "tasks",
    "precompile",
    "train",
    "consolidate",
    "merge",
    "generate",
    "eval",
]


class RunConfig(Section):
    """One run file."""

    name: Annotated[
        str, matches(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "at most 64 letters, digits, dots, underscores and hyphens")
    ] = Field(description="Name of the run; used in paths and Slurm job names.")
    engine: EngineName = Field(
        description="`torch` (CPU, CUDA, trn2), `neuron` (PyTorch/XLA on trn1, trn2) or `trl` (TRL's trainers on CPU,"
        " CUDA); docs/engines.md compares them."
    )
    seed: NonNegativeInt = Field(42, description="Seed of the data order, the adapters and dropout.")
    cluster: Cluster = Field(default_factory=Cluster)
    env: PythonEnvironment = Field(default_factory=PythonEnvironment)
    model: Model
    dataset: Data
    lora: Lora = Field(default_factory=Lora)
    dpo: Dpo = Field(default_factory=Dpo)
    kto: Kto = Field(default_factory=Kto)
    grpo: Grpo = Field(default_factory=Grpo)
    reward: tuple[Reward, ...] = ()
    training: Training = Field(default_factory=Training)
    parallelism: Parallelism = Field(default_factory=Parallelism)
    neuron: Neuron = Field(default_factory=Neuron)
    trl: dict[str, Any] = Field(
        {},
        description="Settings of TRL's trainer that have no key elsewhere, by TRL's names, such as"
        " `neftune_noise_alpha: 5` (engine trl; docs/engines.md lists them).",
    )
    merge: Merge = Field(default_factory=Merge)
    generate: Generate = Field(default_factory=Generate)
    tracking: Tracking = Field(default_factory=Tracking)
    eval: Eval | None = None
    sagemaker: SageMaker | None = None
    deploy: Deploy | None = None

    @model_validator(mode="after")
    def _settings_go_together(self) -> "RunConfig":
        """What is wrong for every engine; what one engine cannot do is in its limits (planning/*/limits.py)."""
        if self.trl and self.engine != "trl":
            raise ValueError(f"trl: has no effect with engine {self.engine}; remove it")
        _check_training(self)
        _check_objective(self)
        if self.sagemaker:
            _check_training_jobs(self, self.sagemaker)
        if self.deploy:
            _check_endpoint(self, self.deploy)
        return self

    @property
    def root(self) -> Path:
        return Path(self.cluster.root)

    @property
    def instance(self) -> Instance:
        """The hardware of a training node."""
        return CATALOGUE[self.cluster.instance_type]

    def rows_per_step(self, data_parallel: int) -> int:
        """Training rows per optimizer step, over all data-parallel ranks; with grpo, each is answered several times."""
        forward = self.training.micro_batch_size * self.training.gradient_accumulation_steps * data_parallel
        return forward // self.grpo.generations if self.training.objective == "grpo" else forward

    @property
    def row_tokens(self) -> int:
        """Positions of a training row, with padding; of a prompt, with all its answers."""
        if self.training.objective != "grpo":
            return self.dataset.row_tokens
        return self.grpo.generations * (self.dataset.max_length + self.grpo.max_completion_length)

    @property
    def has_other_interpreters(self) -> bool:
        """Whether its jobs may be on machines that lack this one's environments: in containers of training jobs."""
        return self.sagemaker is not None

    def by_key(self) -> dict[str, Any]:
        """Each setting as JSON has it, by `section.key`."""
        return flattened(self.model_dump(mode="json"))

    def differing(self) -> dict[str, Any]:
        """Those that differ from their defaults."""
        return flattened(self.model_dump(mode="json", exclude_defaults=True))


# the formats that an objective needs, and that no other has
_FORMATS = {"dpo": "preference", "kto": "unpaired-preference", "grpo": "prompt", "reward": "preference"}
# the sections that only one objective has, and their defaults
_SECTIONS = {"dpo": ("dpo", Dpo()), "kto": ("kto", Kto()), "grpo": ("grpo", Grpo()), "reward": ("grpo", ())}


def _check_training(config: RunConfig) -> None:
    """Validation needs held-out rows and somewhere to save; what chooses between steps needs several validations."""
    training = config.training
    if training.method == "full" and config.merge.dtype != "base":
        raise ValueError("merge.dtype: has no effect with training.method full; remove it")
    if training.method == "full" and config.model.adapter:
        raise ValueError(
            "model.adapter: training.method full trains no adapter; merge it into its base (hyperpod-ft merge), and"
            " train that model"
        )
    if config.model.adapter and config.model.added_tokens:
        raise ValueError(
            "model.adapter: is not continued with model.new_tokens; merge it into its base (hyperpod-ft merge), and"
            " train that model"
        )
    if training.validate_every_steps and not config.dataset.validates:
        raise ValueError(
            "training.validate_every_steps: dataset.validation_share 0 holds out no rows; raise it, for example to 0.02"
        )
    for key in ("keep_best", "early_stopping_patience"):
        if getattr(training, key) and not training.validate_every_steps:
            raise ValueError(f"training.{key}: needs validation losses; set training.validate_every_steps")
    if training.weights_dtype != "fp32" and not (training.keep_best or training.save_only_model):
        raise ValueError("training.weights_dtype: has no effect without keep_best or save_only_model; remove it")
    if training.activation_checkpointing == "none" and training.activation_checkpointing_every > 1:
        raise ValueError(
            "training.activation_checkpointing_every: has no effect without activation_checkpointing; set both"
        )
    if config.eval and config.eval.include_revision and not config.eval.include_path:
        raise ValueError("eval.include_revision: has no effect without include_path; remove it")


def _check_objective(config: RunConfig) -> None:
    """Preferences and DPO need each other, as do marked completions and KTO, and prompts, rewards and GRPO."""
    objective, dataset = config.training.objective, config.dataset
    of_data = [of for of, form in _FORMATS.items() if form in dataset.formats]
    if objective not in of_data if of_data else objective in _FORMATS:
        of = objective if objective in _FORMATS else of_data[0]
        raise ValueError(
            f"training.objective: {objective} does not train on dataset.format {dataset.formats[0]};"
            f" objective {of} and format {_FORMATS[of]} go together"
        )
    for key, (of, default) in _SECTIONS.items():
        if objective != of and getattr(config, key) != default:
            raise ValueError(f"{key}: has no effect without training.objective {of}; remove it")
    if objective == "grpo":
        _check_rewards(config)
    if objective == "dpo" and dataset.packing == "wrapped":
        raise ValueError("dataset.packing: wrapped would cut pairs; use bfd or none for format preference")
    if objective in ("kto", "reward") and dataset.packing not in ("auto", "none"):
        raise ValueError(
            f"dataset.packing: {dataset.packing} is not possible with objective {objective}; set it to none"
        )
    if objective == "reward":
        _check_reward_model(config)
    if objective in ("dpo", "kto", "reward") and dataset.loss_on != "completion":
        raise ValueError(
            f"dataset.loss_on: objective {objective} compares completions after a prompt; leave it at completion"
        )


def _check_reward_model(config: RunConfig) -> None:
    """It scores answers, and writes none."""
    for key, default in (("generate", Generate()), ("eval", None), ("deploy", None)):
        if getattr(config, key) != default:
            raise ValueError(f"{key}: a reward model writes no answers; remove the section")
    if config.lora.modules_to_save:
        raise ValueError("lora.modules_to_save: a reward model trains its score so, and nothing else; leave it out")


def _check_rewards(config: RunConfig) -> None:
    """What GRPO needs, and what it has none of."""
    dataset, names = config.dataset, [reward.known_as for reward in config.reward]
    if not config.reward:
        raise ValueError("reward: is missing; list at least one function for objective grpo (docs/engines.md)")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"reward.{names.index(twice)}.name: {twice} is there twice; give one of them another name")
    if config.training.validate_every_steps:
        raise ValueError("training.validate_every_steps: objective grpo has no validation loss; remove it")
    for key, possible in (("packing", ("auto", "none")), ("overlong", ("drop",)), ("loss_on", ("completion",))):
        if (value := getattr(dataset, key)) not in possible:
            raise ValueError(f"dataset.{key}: {value} is not possible with format prompt; set it to {possible[-1]}")


def _check_training_jobs(config: RunConfig, section: SageMaker) -> None:
    """What training jobs cannot do."""
    if config.eval:
        raise ValueError("eval: SageMaker training jobs do not evaluate; remove section eval or section sagemaker")
    if config.engine != "torch" and section.store and config.cluster.nodes > 1:
        raise ValueError(
            f"sagemaker.store: with engine {config.engine}, several nodes write their checkpoints to one shared volume;"
            " set sagemaker.file_system instead"
        )
    own = [f"reward.{number}.function" for number, reward in enumerate(config.reward) if reward.file]
    if section.store and own:
        raise ValueError(
            f"{own[0]}: with sagemaker.store, training jobs do not get your file; use the kit's functions, or set"
            " sagemaker.file_system instead"
        )


def _check_endpoint(config: RunConfig, section: Deploy) -> None:
    """What no endpoint will serve is refused before the training."""
    if config.dataset.max_target_length is not None:
        raise ValueError(
            "deploy: vLLM does not serve encoder-decoders; remove the section, and serve the tuned model with"
            " `hyperpod-ft serve`"
        )
    if section.model == "merged":
        return
    if config.training.method != "lora":
        raise ValueError("deploy.model: training.method full makes no adapter; set it to merged")
    if config.lora.dora:
        raise ValueError("deploy.model: vLLM does not serve DoRA adapters with a base model; set it to merged")
    if config.lora.target_parameters:
        raise ValueError("deploy.model: vLLM is not known to serve adapters of experts; set it to merged")
    if config.lora.modules_to_save:
        raise ValueError(
            "deploy.model: vLLM serves no adapter with whole modules (lora.modules_to_save); set it to merged"
        )
    if config.model.added_tokens:
        raise ValueError("deploy.model: vLLM is not known to serve adapters of new tokens; set it to merged")
    if config.lora.r > MAX_LORA_RANK:
        raise ValueError(f"deploy.model: vLLM serves adapters of rank {MAX_LORA_RANK} or less; set it to merged")


def require_defaults(config: RunConfig, keys: Iterable[str], reason: str) -> None:
    """Raises UserError, with the reason, for a key whose value is neither its default nor false."""
    given = config.differing()
    for key in keys:
        if given.get(key):
            section, name = key.split(".")
            default = type(getattr(config, section)).model_fields[name].default
            remedy = "leave it out" if default in (None, ()) else f"set it to {str(default).lower()} or leave it out"
            raise UserError(f"{key}: {reason}", remedy)
