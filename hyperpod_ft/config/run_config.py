"""RunConfig: everything a run file may say, with its meaning, unit and default.

A run file is YAML; unknown keys are refused, values are checked, and the result is frozen. `docs/run-file.md`
is generated from this module.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from hyperpod_ft.config.engine_rules import FLASH_ATTENTION_LENGTH, check_engine
from hyperpod_ft.config.fields import (
    NonNegativeFloat,
    NonNegativeInt,
    PackageRepository,
    PlainPath,
    PositiveFloat,
    PositiveInt,
    Revision,
    Section,
    Share,
    SlurmWord,
    Source,
    TimeLimit,
    holds_secret,
    matches,
    no_control_characters,
    shortened,
    shown,
)
from hyperpod_ft.config.instances import CATALOGUE

Stage = Literal["env", "download", "dataset", "precompile", "train", "consolidate", "merge", "generate"]

_SECRET_NAME = re.compile(r"TOKEN(?!IZERS)|SECRET|PASS(WORD|WD|PHRASE)|CREDENTIAL|AUTH|KEY", re.IGNORECASE)
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What the scripts set themselves.
_RESERVED_NAMES = re.compile(
    r"RUN_DIR|PATH|PYTHON.*|BASH_.*|HYPERPOD_FT_.*|SLURM_.*|SBATCH_.*|MASTER_(ADDR|PORT)|python|launch|TMPDIR|OMP_NUM_THREADS"
    r"|(HF_HUB|TRANSFORMERS)_OFFLINE|TORCHELASTIC_.*"
)


class Cluster(Section):
    """Where the jobs run."""

    root: PlainPath = Field(
        "/fsx/hyperpod-ft",
        description="Directory on the volume that every node sees; models, datasets, environments and runs"
        " live below it. A relative path starts at the run file's directory.",
    )
    instance_type: str = Field(
        "local", description="Instance type of the training nodes; `local` for CPU cores, of any machine."
    )
    nodes: PositiveInt = Field(1, le=10_000, description="Number of training nodes.")
    partition: SlurmWord | None = Field(
        None,
        description="Slurm partition of the stages that ask for accelerators. HyperPod names its default one `dev`.",
    )
    cpu_partition: SlurmWord | None = Field(
        None, description="Partition of the stages that need no accelerator; `partition` when left out."
    )
    account: SlurmWord | None = Field(None, description="Slurm account to charge.")
    qos: SlurmWord | None = Field(None, description="Slurm quality of service.")
    reservation: SlurmWord | None = Field(None, description="Slurm reservation to run in.")
    time_limit: TimeLimit = Field(
        "1-00:00:00",
        description="Time limit of the stages that train, in Slurm's form [days-]hours:minutes:seconds.",
    )
    cpu_time_limit: TimeLimit = Field("08:00:00", description="Time limit of each of the other stages.")
    max_restarts: NonNegativeInt = Field(
        3,
        description="How often a training job whose ranks crash is started again, from its newest checkpoint, before it"
        " counts as failed. Time limits, and nodes that Slurm itself finds lost, do not count.",
    )
    cpus_per_cpu_stage: PositiveInt = Field(
        8, description="CPUs each stage without accelerators asks for; at most 2 on instance type `local`."
    )
    memory_gb_per_cpu_stage: PositiveInt | None = Field(
        None, description="Memory each stage without accelerators asks for, in GB; Slurm's default when left out."
    )
    price_per_node_hour: PositiveFloat | None = Field(
        None,
        description="What one training node costs an hour, in your currency; gives the cost of training in its record"
        " and in `status` and `compare`.",
    )
    mail_user: Annotated[str, matches(r"[A-Za-z0-9][A-Za-z0-9._+@-]{0,127}", "an address")] | None = Field(
        None, description="Whom Slurm tells when a job fails, runs out of time, or can never start."
    )
    environment: dict[str, str] = Field(
        default_factory=dict,
        description="Further environment variables for every job. Never a secret: those are inherited from"
        " the shell that submits.",
    )

    @field_validator("instance_type")
    @classmethod
    def _known_instance(cls, value: str) -> str:
        name = value.removeprefix("ml.")
        if name not in CATALOGUE:
            raise ValueError(f"unknown instance type; known: {', '.join(sorted(CATALOGUE))}")
        return name

    @field_validator("environment")
    @classmethod
    def _plain_environment(cls, value: dict[str, str]) -> dict[str, str]:
        for name, content in value.items():
            if not _ENVIRONMENT_NAME.fullmatch(name):
                raise ValueError(f"{shown(name)} is not a valid name of an environment variable")
            if _RESERVED_NAMES.fullmatch(name):
                raise ValueError(f"{shortened(name)} is set by the job scripts; remove it")
            if _SECRET_NAME.search(name) or holds_secret(content):
                raise ValueError(f"{shortened(name)} looks like a secret; export it in the shell that submits instead")
            no_control_characters(content)
        return value


class PythonEnvironment(Section):
    """The Python environment of the stages that need torch."""

    python: PlainPath | None = Field(
        None,
        description="An existing interpreter to use: its path, or `current` for the one running hyperpod-ft."
        " Left out, the `env` stage builds a virtual environment below `cluster.root`.",
    )
    sdk: Literal["2.26.1", "2.28.0"] = Field(
        "2.26.1",
        description="Engine neuron: the AWS Neuron SDK whose packages are installed. `2.26.1` is what optimum-neuron"
        " 0.4.5 was released with; `2.28.0` is newer.",
    )
    package_repositories: tuple[PackageRepository, ...] = Field(
        (),
        description="Engine neuron: where pip finds the Neuron packages and a PyTorch without CUDA, and nothing else:"
        " URLs of package indexes (AWS's Neuron repository, and the one of PyTorch's CPU builds), or directories of"
        " wheels. Left out, pip's own configuration has to name them.",
    )


class Model(Section):
    """The base model."""

    source: Source = Field(
        description="A Hugging Face Hub id (`meta-llama/Meta-Llama-3-8B`), an `s3://bucket/prefix` URI, a local"
        " directory (absolute, or starting with `.`), or `example:tiny-llama`, which the kit ships."
    )
    revision: Revision | None = Field(
        None, description="Hub commit (recommended), tag or branch; `main` when left out. Only for Hub ids."
    )
    attention: Literal["sdpa", "eager"] = Field("sdpa", description="Attention implementation of transformers.")


class Dataset(Section):
    """The training data and how it becomes tokens."""

    source: Source = Field(
        description="A Hub dataset id, an `s3://` URI, a local file or directory (absolute, or starting with `.`),"
        " or `example:qa`, which the kit ships."
    )
    revision: Revision | None = Field(None, description="Hub commit, tag or branch. Only for Hub ids.")
    files: tuple[str, ...] = Field(
        ("*.jsonl", "*.json", "*.parquet"),
        min_length=1,
        description="Patterns of the files to read, relative to the source.",
    )
    format: Literal["dolly", "alpaca", "prompt-completion", "chat", "text", "template"] = Field(
        description="`dolly` (instruction, context, response), `alpaca` (instruction, input, output),"
        " `prompt-completion` (prompt, completion), `chat` (messages, through the tokenizer's chat template),"
        " `text` (text), or `template` (prompt_template and completion_template below)."
    )
    prompt_template: str | None = Field(None, description="Jinja over the row's fields; for format `template`.")
    completion_template: str | None = Field(None, description="Jinja over the row's fields; for format `template`.")
    max_length: Annotated[PositiveInt, Field(ge=8, le=1 << 20)] = Field(
        2048, description="Tokens in every training row."
    )
    loss_on: Literal["completion", "all"] = Field(
        "completion", description="Whether prompt tokens count in the loss. `text` rows have no prompt."
    )
    packing: Literal["bfd", "wrapped", "none"] = Field(
        "bfd",
        description="`bfd` packs whole examples best-fit, `wrapped` cuts one long stream, `none` pads each example.",
    )
    overlong: Literal["drop", "truncate"] = Field(
        "drop", description="What happens to an example longer than max_length (`wrapped` cuts nothing off)."
    )
    validation_share: Share = Field(0.02, description="Share of the rows set aside for validation, 0 to 1.")
    max_bad_rows: NonNegativeInt = Field(
        0,
        description="How many unusable rows are tolerated before the stage stops. Each is listed with its line.",
    )
    workers: NonNegativeInt = Field(
        0, description="Processes that tokenize; 0 means one per CPU of the job, as far as each has 4 MB of text."
    )

    @model_validator(mode="after")
    def _templates_belong_to_their_format(self) -> "Dataset":
        given = self.prompt_template is not None or self.completion_template is not None
        if self.format == "template" and self.completion_template is None:
            raise ValueError("format template needs completion_template (and usually prompt_template)")
        if self.format != "template" and given:
            raise ValueError(f"prompt_template and completion_template belong to format template, not {self.format}")
        if given:
            self._check_templates()
        return self

    def _check_templates(self) -> None:
        from jinja2 import Environment, TemplateSyntaxError  # noqa: PLC0415 - only this format needs it

        for key in ("prompt_template", "completion_template"):
            try:
                Environment().parse(getattr(self, key) or "")  # noqa: S701 - only parsed
            except TemplateSyntaxError as error:
                raise ValueError(f"{key}: line {error.lineno}: {shortened(str(error.message))}") from error


class Lora(Section):
    """LoRA adapters, in PEFT's terms."""

    r: PositiveInt = Field(16, description="Rank of the adapters.")
    alpha: PositiveFloat = Field(32, description="Scale: the update is multiplied by alpha / r.")
    dropout: Share = Field(0.0, description="Dropout on the adapters' input.")
    target_modules: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="Names of the linear modules that get an adapter.",
    )
    rslora: bool = Field(False, description="Rank-stabilised LoRA: scale by alpha / sqrt(r).")


class Training(Section):
    """The optimisation."""

    method: Literal["lora", "full"] = Field("lora", description="Train LoRA adapters or every parameter.")
    epochs: PositiveFloat = Field(3, description="Passes over the training rows; may be a fraction.")
    max_steps: PositiveInt | None = Field(None, description="Stop after this many optimizer steps instead.")
    micro_batch_size: PositiveInt = Field(1, description="Rows per forward pass on each data-parallel rank.")
    gradient_accumulation_steps: PositiveInt = Field(1, description="Forward passes per optimizer step.")
    learning_rate: PositiveFloat = Field(2e-4, description="Peak learning rate of AdamW.")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="What follows the warm-up.")
    warmup_share: Share = Field(0.03, description="Share of all steps over which the learning rate rises from 0.")
    weight_decay: NonNegativeFloat = Field(0.0, description="AdamW's decoupled weight decay.")
    adam_beta1: Share = Field(0.9, description="AdamW's first-moment decay.")
    adam_beta2: Share = Field(0.999, description="AdamW's second-moment decay.")
    max_grad_norm: NonNegativeFloat = Field(1.0, description="Gradients are clipped to this norm; 0 turns it off.")
    precision: Literal["bf16", "fp32"] = Field(
        "bf16",
        description="`bf16` computes in bfloat16 with fp32 trainable weights; `fp32` computes in fp32.",
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Recompute activations in the backward pass, and with data parallelism gather layers again in it:"
        " less memory for more time.",
    )
    sanity_steps: NonNegativeInt = Field(
        20,
        description="From this step on, or the last one if there are fewer, training stops when the smoothed loss is"
        " above the base model's by sanity_margin; at step 1 when the base model's is that much above guessing among"
        " its tokens. 0 turns both off; a loss that is no finite number always stops it.",
    )
    sanity_margin: PositiveFloat = Field(2.0, description="How much the loss may be above, in nats a token.")
    log_every_steps: PositiveInt = Field(1, description="Steps between rows of metrics.jsonl.")
    save_every_steps: PositiveInt = Field(100, description="Steps between checkpoints; the last step always saves.")
    keep_checkpoints: PositiveInt = Field(2, description="Newest complete checkpoints kept on disk.")


class Parallelism(Section):
    """How the ranks divide; data parallelism is what remains."""

    tensor_parallel: PositiveInt | None = Field(
        None,
        description="Ranks that share each layer's matrices, on one node; left out, 8 on trn1 and 4 on trn2 with engine"
        " neuron, else 1.",
    )
    pipeline_parallel: PositiveInt = Field(1, description="Groups of layers on ranks of their own (engine neuron).")
    ranks_per_node: PositiveInt | None = Field(
        None, description="Training processes per node; the instance type's accelerators when left out."
    )


class Neuron(Section):
    """What engine neuron is told besides; the other engine leaves it unread."""

    sequence_parallel: bool = Field(
        True,
        description="Divide activations between layers over the tensor-parallel ranks: less memory, and what bf16"
        " needs to be right.",
    )
    flash_attention: bool | None = Field(
        None,
        description="Neuron's flash attention kernel, which needs dataset.max_length to be a multiple of 2048; left"
        " out, it is used where that is so.",
    )
    zero_1: bool = Field(True, description="ZeRO-1: divide the optimizer's state over the data-parallel ranks.")
    master_weights: bool = Field(
        True, description="bf16 with ZeRO-1: the optimizer keeps fp32 weights and adds up gradients in fp32."
    )
    stochastic_rounding: bool = Field(True, description="Round to bf16 up or down at random, in proportion.")
    fuse_qkv: bool = Field(False, description="One matrix for query, key and value projections.")
    xser: bool = Field(True, description="Write one file for each tensor of a checkpoint, straight from the device.")
    async_save: bool = Field(
        False, description="Write checkpoints while training goes on, for as much host memory as they take."
    )
    precompile_steps: PositiveInt = Field(
        10,
        le=1000,
        description="Steps of the trial from which `precompile` learns what to compile; AWS recommends 10 to 15.",
    )


class Merge(Section):
    """The merged model on disk."""

    dtype: Literal["base", "bfloat16", "float16", "float32"] = Field(
        "base", description="dtype of the merged weights; `base` keeps each tensor's own."
    )
    max_shard_size_gb: PositiveFloat = Field(5.0, description="Largest safetensors file, in GB (1e9 bytes).")


class Generate(Section):
    """The comparison of base and tuned model after the merge."""

    prompts: tuple[str | dict[str, Any], ...] = Field(
        (),
        description="Prompts to answer: plain strings, or rows in the dataset's format, rendered as in training.",
    )
    max_new_tokens: PositiveInt = Field(64, description="Longest answer, in tokens.")
    train_samples: NonNegativeInt = Field(
        8,
        le=256,
        description="Training rows, sampled once, whose answers are compared with the expected ones.",
    )
    validation_samples: NonNegativeInt = Field(8, le=256, description="Validation rows treated the same way.")


class RunConfig(Section):
    """One run file."""

    name: Annotated[
        str, matches(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "letters, digits, dots, underscores and hyphens, at most 64")
    ] = Field(description="Name of the run; part of paths and of Slurm job names.")
    engine: Literal["torch", "neuron"] = Field(description="`torch` (CPU, CUDA, TorchNeuron) or `neuron` (trn1, trn2).")
    seed: NonNegativeInt = Field(42, description="Seed of data order, adapters and dropout.")
    cluster: Cluster = Field(default_factory=Cluster)
    env: PythonEnvironment = Field(default_factory=PythonEnvironment)
    model: Model
    dataset: Dataset
    lora: Lora = Field(default_factory=Lora)
    training: Training = Field(default_factory=Training)
    parallelism: Parallelism = Field(default_factory=Parallelism)
    neuron: Neuron = Field(default_factory=Neuron)
    merge: Merge = Field(default_factory=Merge)
    generate: Generate = Field(default_factory=Generate)

    @model_validator(mode="after")
    def _suits_its_engine(self) -> "RunConfig":
        check_engine(self)
        return self

    @property
    def root(self) -> Path:
        return Path(self.cluster.root)

    @property
    def flash_attention(self) -> bool:
        """Whether engine neuron computes attention with Neuron's kernel: as asked, or where rows have its length."""
        wanted = self.neuron.flash_attention
        return self.dataset.max_length % FLASH_ATTENTION_LENGTH == 0 if wanted is None else wanted
