"""RunConfig: a run file. Unknown keys are refused, values are checked, and the result is frozen.

Its keys are in sections/. `docs/run-file.md` is generated from them.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hyperpod_ft.config import prompt_images
from hyperpod_ft.config.fields import NonNegativeInt, Section, flattened, matches
from hyperpod_ft.config.instances import CATALOGUE, Instance
from hyperpod_ft.config.sections.cluster import Cluster, PythonEnvironment, Tracking
from hyperpod_ft.config.sections.data import Data
from hyperpod_ft.config.sections.inputs import Model
from hyperpod_ft.config.sections.parallelism import Neuron, Parallelism
from hyperpod_ft.config.sections.results import Eval, Generate, Merge
from hyperpod_ft.config.sections.rewards import Reward, Sampling
from hyperpod_ft.config.sections.sagemaker import MAX_LORA_RANK, Deploy, SageMaker
from hyperpod_ft.config.sections.training import Dpo, Kto, Lora, Teacher, Training
from hyperpod_ft.errors import UserError

EngineName = Literal["auto", "torch", "neuron", "trl"]
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
        description="`torch` (CPU, CUDA, trn2), `neuron` (trn1, trn2), `trl` (CPU, CUDA), or `auto`: trl for what torch"
        " does not have, else torch (docs/engines.md)."
    )
    seed: NonNegativeInt = Field(42, description="Seed of the data order, the adapters and dropout.")
    cluster: Cluster = Field(default_factory=Cluster)
    env: PythonEnvironment = Field(default_factory=PythonEnvironment)
    model: Model
    dataset: Data
    lora: Lora = Field(default_factory=Lora)
    dpo: Dpo = Field(default_factory=Dpo)
    kto: Kto = Field(default_factory=Kto)
    sampling: Sampling = Field(default_factory=Sampling)
    reward: tuple[Reward, ...] = ()
    teacher: Teacher | None = None
    training: Training = Field(default_factory=Training)
    parallelism: Parallelism = Field(default_factory=Parallelism)
    neuron: Neuron = Field(default_factory=Neuron)
    trl: dict[str, Any] = Field(
        {},
        description="Settings of TRL's trainer that have no key elsewhere, by TRL's names, such as"
        " `neftune_noise_alpha: 5` (engine trl).",
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
        if self.trl and self.engine not in ("trl", "auto"):
            raise ValueError(f"trl: has no effect with engine {self.engine}; remove it")
        _check_training(self)
        _check_interpreters(self)
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
        """Training rows per optimizer step, over all data-parallel ranks; prompts are answered several times."""
        forward = self.training.micro_batch_size * self.training.gradient_accumulation_steps * data_parallel
        return forward // self.answers_per_prompt

    @property
    def answers_per_prompt(self) -> int:
        """How often a row is sampled; 1 without prompts."""
        return self.sampling.generations if self.training.has_rewards else 1

    @property
    def vllm_share(self) -> float:
        """The share of a GPU's memory in which vLLM samples answers, beside their training; 0 without vLLM."""
        return self.trl.get("vllm_gpu_memory_utilization", 0.3) if self.trl.get("use_vllm") else 0.0

    @property
    def row_tokens(self) -> int:
        """Positions of a training row, with padding; of a prompt, with all its answers."""
        if not self.training.samples_answers:
            return self.dataset.row_tokens
        return self.answers_per_prompt * (self.dataset.max_length + self.sampling.max_completion_length)

    @property
    def scores_rouge(self) -> bool:
        given = self.generate.rouge
        return self.dataset.max_target_length is not None if given is None else given

    @property
    def has_other_interpreters(self) -> bool:
        """Whether its jobs may be on machines that lack this one's environments: in containers of training jobs."""
        return self.sagemaker is not None

    def by_key(self) -> dict[str, Any]:
        """Each setting as JSON has it, by `section.key`."""
        return flattened(self.model_dump(mode="json"))

    def differing(self) -> dict[str, Any]:
        """Those that differ from their defaults. Of a prompt's pictures, what is in them counts, not where they are."""
        found = flattened(self.model_dump(mode="json", exclude_defaults=True))
        if prompts := found.get("generate.prompts"):
            found["generate.prompts"] = [prompt_images.without_sources(prompt) for prompt in prompts]
        return found


# formats that some objectives need, and no other has
_OBJECTIVES = {
    "preference": ("dpo", "reward"),
    "unpaired-preference": ("kto",),
    "prompt": ("grpo", "rloo", "distillation"),
}
# what only some objectives have, and its default
_SECTIONS: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("dpo", Dpo(), ("dpo",)),
    ("kto", Kto(), ("kto",)),
    ("sampling", Sampling(), _OBJECTIVES["prompt"]),
    ("reward", (), ("grpo", "rloo")),
    ("teacher", None, ("distillation",)),
)


def _check_training(config: RunConfig) -> None:
    """Validation needs held-out rows and somewhere to save; what chooses between steps needs several validations."""
    training = config.training
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
    if training.validate_rouge_rows and config.dataset.max_target_length is None:
        raise ValueError("training.validate_rouge_rows: only for encoder-decoders (T5); remove it")
    for key in ("validate_every_steps", "validate_rouge_rows"):
        if getattr(training, key) and not config.dataset.validates:
            raise ValueError(
                f"training.{key}: dataset.validation_share 0 holds out no rows; raise it, for example to 0.02"
            )
    for key in ("keep_best", "early_stopping_patience"):
        if getattr(training, key) and not training.validate_every_steps:
            raise ValueError(f"training.{key}: needs validation losses; set training.validate_every_steps")
    if training.weights_dtype != "fp32" and not (training.keep_best or training.save_only_model):
        raise ValueError("training.weights_dtype: has no effect without keep_best or save_only_model; remove it")
    if (every := training.memory_checkpoint_every_steps) and training.save_only_model:
        raise ValueError(
            "training.memory_checkpoint_every_steps: has no effect with save_only_model, with which an interrupted"
            " training starts again; remove one of them"
        )
    if every and every >= training.save_every_steps:
        raise ValueError(
            f"training.memory_checkpoint_every_steps: {every} is not below save_every_steps"
            f" {training.save_every_steps}; lower it, or remove it"
        )
    if training.activation_checkpointing == "none" and training.activation_checkpointing_every > 1:
        raise ValueError(
            "training.activation_checkpointing_every: has no effect without activation_checkpointing; set both"
        )
    if config.eval and config.eval.include_revision and not config.eval.include_path:
        raise ValueError("eval.include_revision: has no effect without include_path; remove it")


def _check_interpreters(config: RunConfig) -> None:
    given = {"env.python": config.env.python, "eval.python": config.eval.python if config.eval else None}
    for key, python in given.items():
        if config.env.container and python == "current":
            raise ValueError(f"{key}: current is not in env.container's image; leave it out, or name one of the image")


def _check_objective(config: RunConfig) -> None:
    """Preferences and what compares completions need each other, and so do prompts and what learns from answers."""
    objective, dataset = config.training.objective, config.dataset
    for form, of in _OBJECTIVES.items():
        if (objective in of) != (form in dataset.formats):
            raise ValueError(
                f"training.objective: {objective} does not train on dataset.format {dataset.formats[0]};"
                f" objective {objective if objective in of else _any(of)} and format {form} go together"
            )
    for key, default, of in _SECTIONS:
        if objective not in of and getattr(config, key) != default:
            raise ValueError(f"{key}: has no effect without training.objective {_any(of)}; remove it")
    if config.training.samples_answers:
        _check_answers(config)
    (_check_images if dataset.images else _check_no_images)(config)
    if objective == "dpo" and dataset.packing == "wrapped":
        raise ValueError("dataset.packing: wrapped would cut a pair in two; use bfd or none for format preference")
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
        raise ValueError(
            "lora.modules_to_save: a reward model trains its score whole, and no other module; leave it out"
        )


def _check_images(config: RunConfig) -> None:
    """Messages say where an image is. Its tokens are neither trained nor cut; those of other images may be the same."""
    if other := next((form for form in config.dataset.formats if form != "chat"), None):
        raise ValueError(f"dataset.images: rows of format {other} have none; set dataset.format to chat")
    alone = {"reasoning": ("drop", "train"), "deduplicate": (False,)}
    _check_possible(config.dataset, "dataset.images", _UNPACKED | alone)


def _check_no_images(config: RunConfig) -> None:
    if config.lora.image_tower:
        raise ValueError("lora.image_tower: has no effect without dataset.images; remove it")
    for number, prompt in enumerate(config.generate.prompts):
        if config.dataset.questions.format == "chat" and prompt_images.of(prompt):
            raise ValueError(f"generate.prompts.{number}: has images; remove them, or set dataset.images")


# Each example is a row, whose prompt is whole and not trained.
_UNPACKED: dict[str, tuple[Any, ...]] = {
    "packing": ("auto", "none"),
    "overlong": ("drop",),
    "loss_on": ("completion",),
}


def _check_possible(dataset: Data, why: str, possible: dict[str, tuple[Any, ...]]) -> None:
    for key, values in possible.items():
        if (value := getattr(dataset, key)) not in values:
            given, other = (str(one).lower() for one in (value, values[-1]))
            raise ValueError(f"dataset.{key}: {given} is not possible with {why}; set it to {other}")


def _any(objectives: tuple[str, ...]) -> str:
    *others, last = objectives
    return f"{', '.join(others)} or {last}" if others else last


def _check_answers(config: RunConfig) -> None:
    """What learning from answers needs, and what it has none of."""
    names = [reward.known_as for reward in config.reward]
    if config.training.has_rewards and not config.reward:
        raise ValueError(
            f"reward: is missing; objective {config.training.objective} needs at least one function (docs/methods.md)"
        )
    if config.training.objective == "distillation":
        if config.teacher is None:
            raise ValueError("teacher: is missing; name the model to learn from (docs/methods.md)")
        for key in ("generations", "beta"):
            if getattr(config.sampling, key) != Sampling.model_fields[key].default:
                raise ValueError(f"sampling.{key}: has no effect with objective distillation; remove it")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"reward.{names.index(twice)}.name: {twice} is there twice; give one of them another name")
    if config.training.validate_every_steps:
        raise ValueError(
            f"training.validate_every_steps: objective {config.training.objective} has no validation loss; remove it"
        )
    _check_possible(config.dataset, "format prompt", _UNPACKED)


def _check_training_jobs(config: RunConfig, section: SageMaker) -> None:
    """What training jobs cannot do."""
    if config.eval:
        raise ValueError("eval: SageMaker training jobs do not evaluate; remove section eval or section sagemaker")
    if config.engine not in ("torch", "auto") and section.store and config.cluster.nodes > 1:
        raise ValueError(
            f"sagemaker.store: with engine {config.engine}, several nodes write their checkpoints to one shared volume;"
            " set sagemaker.file_system instead"
        )
    own = [f"reward.{number}.function" for number, reward in enumerate(config.reward) if reward.file]
    for number, prompt in enumerate(config.generate.prompts):
        own += [f"generate.prompts.{number}"] * any(map(prompt_images.path_of, prompt_images.of(prompt)))
    if section.store and own:
        raise ValueError(
            f"{own[0]}: with sagemaker.store, training jobs do not get your file; leave it out, or set"
            " sagemaker.file_system instead"
        )


def _check_endpoint(config: RunConfig, section: Deploy) -> None:
    """What no endpoint will serve is refused before the training."""
    if config.dataset.max_target_length is not None and section.container_kind != "kit":
        raise ValueError("deploy.container: vLLM does not serve encoder-decoders; set it to kit")
    if config.dataset.images:
        raise ValueError("deploy: endpoints have not been tried with dataset.images; remove the section")
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
    """Raises UserError, with the reason, for a key, or section, whose value is neither its default nor false."""
    given = {key for key, value in config.differing().items() if value}
    for key in keys:
        if key in given or any(each.startswith(f"{key}.") for each in given):
            section, name = key.split(".")
            default = type(getattr(config, section)).model_fields[name].default
            remedy = "leave it out" if default in (None, ()) else f"set it to {str(default).lower()} or leave it out"
            raise UserError(f"{key}: {reason}", remedy)
