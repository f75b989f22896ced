"""RunConfig: every key of a run file, with its meaning, unit and default.

Unknown keys are refused, values are checked, and the result is frozen. `docs/run-file.md` is generated from this
module.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from hyperpod_ft.config.deploy import Deploy
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
from hyperpod_ft.config.instances import CATALOGUE, names
from hyperpod_ft.config.sagemaker_section import SageMaker
from hyperpod_ft.config.setting_combinations import FLASH_ATTENTION_LENGTH, check_combinations

EngineName = Literal["torch", "neuron"]
StageName = Literal["env", "download", "dataset", "precompile", "train", "consolidate", "merge", "generate"]

_EXPERIMENTAL_ON_GPUS = "experimental on GPUs: never run on one."  # the end of a description

_SECRET_NAME = re.compile(r"TOKEN(?!IZERS)|SECRET|PASS(WORD|WD|PHRASE)|CREDENTIAL|AUTH|KEY", re.IGNORECASE)
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# The job scripts set these.
_RESERVED_NAMES = re.compile(
    r"RUN_DIR|PATH|PYTHON.*|BASH_.*|HYPERPOD_FT_.*|SLURM_.*|SBATCH_.*|MASTER_(ADDR|PORT)|python|TMPDIR|OMP_NUM_THREADS"
    r"|(HF_HUB|TRANSFORMERS)_OFFLINE|TORCHELASTIC_.*"
)


class Cluster(Section):
    """Where the jobs run."""

    root: PlainPath = Field(
        "/fsx/hyperpod-ft",
        description="Directory on the shared volume; models, datasets, environments and runs are kept below it."
        " A relative path is relative to the run file's directory.",
    )
    instance_type: str = Field(
        "local",
        description="Instance type of the training nodes; `local` trains on the CPUs of any machine, types such as"
        " `c7i.4xlarge` on theirs.",
    )
    nodes: PositiveInt = Field(1, le=10_000, description="Number of training nodes.")
    partition: SlurmWord | None = Field(
        None,
        description="Slurm partition of the stages that use accelerators; HyperPod's default one is `dev`.",
    )
    cpu_partition: SlurmWord | None = Field(
        None, description="Slurm partition of the stages that use only CPUs; the same as `partition` if not set."
    )
    account: SlurmWord | None = Field(None, description="Slurm account to charge.")
    qos: SlurmWord | None = Field(None, description="Slurm quality of service.")
    reservation: SlurmWord | None = Field(None, description="Slurm reservation to run in.")
    time_limit: TimeLimit = Field(
        "1-00:00:00",
        description="Time limit of the stages that train, in Slurm's format [days-]hours:minutes:seconds.",
    )
    cpu_time_limit: TimeLimit = Field("08:00:00", description="Time limit of each other stage.")
    max_restarts: NonNegativeInt = Field(
        3,
        description="How many times a training job whose ranks crash is restarted from its newest checkpoint before it"
        " counts as failed. Restarts after the time limit are not counted, nor are those that Slurm"
        " itself makes by requeueing the job of a lost node. As SageMaker training jobs, crashes and lost instances of"
        " all jobs of a submission count together; in addition, SageMaker starts each job again so many times after"
        " internal errors of its own.",
    )
    cpus_per_cpu_stage: PositiveInt = Field(
        8,
        description="CPUs requested for stages `dataset` and `generate` when they run on CPUs; `env` requests 1, and"
        " `download`, `consolidate` and `merge` 2 each. At most 2 on instance type `local`.",
    )
    memory_gb_per_cpu_stage: PositiveInt | None = Field(
        None, description="Memory requested for each stage that uses only CPUs, in GB; Slurm's default if not set."
    )
    price_per_node_hour: PositiveFloat | None = Field(
        None,
        description="Price of one training node per hour, in your currency. If set, the record of the training,"
        " `status` and `compare` show its cost.",
    )
    mail_user: Annotated[str, matches(r"[A-Za-z0-9][A-Za-z0-9._+@-]{0,127}", "an e-mail address")] | None = Field(
        None,
        description="Address that Slurm mails when a job fails, reaches its time limit, or can never start. Has no"
        " effect on SageMaker training jobs: docs/training-jobs.md has a rule of EventBridge for them.",
    )
    environment: dict[str, str] = Field(
        default_factory=dict,
        description="Additional environment variables of every job. Not for secrets: jobs inherit those from the shell"
        " that submits.",
    )

    @field_validator("instance_type")
    @classmethod
    def _known_instance(cls, value: str) -> str:
        name = value.removeprefix("ml.")
        if name not in CATALOGUE:
            raise ValueError(f"unknown instance type; known: {', '.join(names())}")
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
    """The Python environment of the stages that use torch."""

    python: PlainPath | None = Field(
        None,
        description="Path of an existing interpreter to use, or `current` for the one that runs hyperpod-ft. If not"
        " set, the `env` stage creates a virtual environment below `cluster.root`.",
    )
    sdk: Literal["2.26.1", "2.28.0"] = Field(
        "2.26.1",
        description="Engine neuron: the version of the AWS Neuron SDK to install. optimum-neuron 0.4.5 was released"
        " with `2.26.1`; `2.28.0` is newer.",
    )
    package_repositories: tuple[PackageRepository, ...] = Field(
        (),
        description="On Trainium: where pip finds the Neuron packages and a PyTorch build without CUDA: URLs of"
        " package indexes (AWS's Neuron repository and PyTorch's index of CPU builds), or directories of wheels. If"
        " not set, pip's own configuration must name them.",
    )


class Model(Section):
    """The base model."""

    source: Source = Field(
        description="A Hugging Face Hub id (`meta-llama/Meta-Llama-3-8B`), an `s3://bucket/prefix` URI, a local"
        " directory (absolute, or starting with `.`), or `example:tiny-llama`, which is included."
    )
    revision: Revision | None = Field(
        None, description="Hub commit (recommended), tag or branch; `main` if not set. Only for Hub ids."
    )


class Dataset(Section):
    """The training data, and how it is tokenized and packed."""

    source: Source = Field(
        description="A Hub dataset id, an `s3://` URI, a local file or directory (absolute, or starting with `.`),"
        " or `example:qa` or `example:preferences`, which are included."
    )
    revision: Revision | None = Field(None, description="Hub commit, tag or branch. Only for Hub ids.")
    files: tuple[str, ...] = Field(
        ("*.jsonl", "*.json", "*.parquet"),
        min_length=1,
        description="Glob patterns of the files to read, relative to the source.",
    )
    format: Literal["dolly", "alpaca", "prompt-completion", "chat", "text", "template", "preference"] = Field(
        description="`dolly` (instruction, context, response), `alpaca` (instruction, input, output),"
        " `prompt-completion` (prompt, completion), `chat` (messages, with the tokenizer's chat template),"
        " `text` (text), `template` (prompt_template and completion_template below), or `preference` (prompt, chosen,"
        " rejected: strings or chat messages; for training.objective dpo)."
    )
    prompt_template: str | None = Field(None, description="Jinja template of the row's fields; for format `template`.")
    completion_template: str | None = Field(
        None, description="Jinja template of the row's fields; for format `template`."
    )
    max_length: Annotated[PositiveInt, Field(ge=8, le=1 << 20)] = Field(
        2048,
        description="Length of every packed row, in tokens; of an encoder-decoder, length of the encoder's part.",
    )
    max_target_length: Annotated[PositiveInt, Field(ge=8, le=1 << 20)] | None = Field(
        None,
        description="Length of the decoder's part of every packed row, in tokens. Required for an encoder-decoder"
        " (T5, Flan-T5), and only for one.",
    )
    loss_on: Literal["completion", "all"] = Field(
        "completion",
        description="Which tokens count in the loss: those of the completion, or those of the prompt too. `text`"
        " rows have no prompt.",
    )
    packing: Literal["bfd", "wrapped", "none"] = Field(
        "bfd",
        description="`bfd` packs whole examples by best fit, `wrapped` concatenates all examples and cuts them into"
        " rows, `none` pads each example to a row. Attention within packed documents (engine torch) is"
        f" {_EXPERIMENTAL_ON_GPUS}",
    )
    overlong: Literal["drop", "truncate"] = Field(
        "drop",
        description="What to do with an example longer than max_length, or max_target_length; has no effect with"
        " packing `wrapped`.",
    )
    validation_share: Share = Field(
        0.02, description="Fraction of the rows held out for validation, at least 0 and below 1."
    )
    max_bad_rows: NonNegativeInt = Field(
        0,
        description="How many unusable rows are skipped; with more, the stage fails. Rows are listed with file and"
        " line.",
    )
    workers: NonNegativeInt = Field(
        0,
        description="Number of tokenizing processes; 0 means one per CPU of the job, with at least 4 MB of text each.",
    )

    @property
    def documents_per_example(self) -> int:
        """How many documents one row of the dataset becomes: a preference is a chosen and a rejected one."""
        return 2 if self.format == "preference" else 1

    @property
    def row_tokens(self) -> int:
        """Positions of a packed row, those of the decoder included."""
        return self.max_length + (self.max_target_length or 0)

    @model_validator(mode="after")
    def _suits_an_encoder_decoder(self) -> "Dataset":
        if self.max_target_length is None:
            return self
        if self.format in ("chat", "text", "preference"):
            raise ValueError(
                f"format {self.format}: an encoder-decoder learns to answer a source with a target; use"
                " prompt-completion, template, dolly or alpaca, or leave max_target_length out"
            )
        if self.loss_on == "all":
            raise ValueError("loss_on all: an encoder-decoder does not predict its prompt; set it to completion")
        if self.packing == "wrapped":
            raise ValueError("packing wrapped: would part sources from their targets; set it to bfd or none")
        return self

    @model_validator(mode="after")
    def _templates_belong_to_their_format(self) -> "Dataset":
        given = self.prompt_template is not None or self.completion_template is not None
        if self.format == "template" and self.completion_template is None:
            raise ValueError("format template needs completion_template (and usually prompt_template); add it")
        if self.format != "template" and given:
            raise ValueError(f"prompt_template and completion_template are for format template, not {self.format}")
        if given:
            self._check_templates()
        return self

    def _check_templates(self) -> None:
        from jinja2 import Environment, TemplateSyntaxError  # noqa: PLC0415 - only this format needs it

        for key in ("prompt_template", "completion_template"):
            try:
                Environment().parse(getattr(self, key) or "")  # noqa: S701 - only parsed
            except RecursionError as error:
                raise ValueError(f"{key}: is nested too deeply") from error
            except TemplateSyntaxError as error:
                raise ValueError(f"{key}: line {error.lineno}: {shortened(str(error.message))}") from error


class Lora(Section):
    """LoRA adapters, as PEFT defines them."""

    r: PositiveInt = Field(16, description="Rank of the adapters.")
    alpha: PositiveFloat = Field(32, description="Scaling: the update is multiplied by alpha / r.")
    dropout: Share = Field(0.0, description="Dropout on the input of the adapters.")
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        None,
        description="Names of the linear modules and embeddings to adapt. If not set: all linears of attention and MLP,"
        " by the model's family (docs/lora.md); of T5, `q` and `v`.",
    )
    rslora: bool = Field(False, description="Rank-stabilised LoRA: scale by alpha / sqrt(r).")
    dora: bool = Field(
        False, description="DoRA: also train the norm of each output's weights (the magnitude). Engine torch."
    )
    plus_ratio: PositiveFloat = Field(
        1.0,
        description="LoRA+: the learning rate of lora_B is this many times training.learning_rate; the paper suggests"
        " 16. Engine torch.",
    )
    quantization: Literal["none", "nf4"] = Field(
        "none",
        description="`nf4` keeps the weights that have adapters in 4 bits while training, except those of the output"
        " layer (QLoRA). Engine torch without tensor parallelism.",
    )

    @property
    def given_names(self) -> frozenset[str]:
        """The last parts of the names in `target_modules`."""
        return last_parts(self.target_modules or ())


def last_parts(names: Iterable[str]) -> frozenset[str]:
    """Of modules' names, or of their ends."""
    return frozenset(name.rpartition(".")[2] for name in names)


class Dpo(Section):
    """Direct preference optimization (training.objective dpo)."""

    beta: PositiveFloat = Field(
        0.1, description="Scale of the rewards: the higher, the closer the model stays to the one it began as."
    )
    label_smoothing: Annotated[Share, Field(lt=0.5)] = Field(
        0.0, description="Assumed share of pairs whose chosen and rejected completions are swapped (conservative DPO)."
    )


class Training(Section):
    """The training loop and optimizer."""

    method: Literal["lora", "full"] = Field("lora", description="Train LoRA adapters, or all parameters.")
    objective: Literal["sft", "dpo"] = Field(
        "sft",
        description="`sft`: make the labelled tokens likely. `dpo`: prefer chosen over rejected completions (section"
        " dpo), with a dataset of format preference (engine torch).",
    )
    epochs: PositiveFloat = Field(3, description="Passes over the training rows; need not be a whole number.")
    max_steps: PositiveInt | None = Field(None, description="Number of optimizer steps; overrides epochs.")
    micro_batch_size: PositiveInt = Field(1, description="Rows per forward pass on each data-parallel rank.")
    gradient_accumulation_steps: PositiveInt = Field(1, description="Forward passes per optimizer step.")
    learning_rate: PositiveFloat = Field(2e-4, description="Peak learning rate of AdamW.")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="Learning rate schedule after the warm-up."
    )
    warmup_share: Share = Field(0.03, description="Fraction of all steps over which the learning rate rises from 0.")
    weight_decay: NonNegativeFloat = Field(0.0, description="AdamW's decoupled weight decay.")
    optimizer_state: Literal["fp32", "bf16", "int8"] = Field(
        "fp32",
        description="How AdamW's moments are stored between steps (engine torch): `bf16` takes half the memory, `int8`"
        " (quantized in blocks) about a quarter.",
    )
    adam_beta1: Share = Field(0.9, description="AdamW's first-moment decay.")
    adam_beta2: Share = Field(0.999, description="AdamW's second-moment decay.")
    max_grad_norm: NonNegativeFloat = Field(
        1.0, description="Norm that gradients are clipped to; 0 turns clipping off."
    )
    precision: Literal["bf16", "fp32"] = Field(
        "bf16",
        description="`bf16` computes in bfloat16, with fp32 adapters (engine torch: all trained weights in fp32);"
        " `fp32` computes in fp32.",
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        "none",
        description="What layers compute again in the backward pass instead of keeping it: nothing, all but matrix"
        " products and attention (`selective`, engine torch), or everything (`full`). Needs less memory and more time.",
    )
    activation_checkpointing_every: PositiveInt = Field(
        1, description="Apply activation_checkpointing to every k-th layer only (engine torch)."
    )
    activation_offload: bool = Field(
        False,
        description="Keep in host memory, until the backward pass, what autograd keeps of each layer: with"
        f" activation_checkpointing the layer's input (engine torch). It is {_EXPERIMENTAL_ON_GPUS}",
    )
    compile: bool | None = Field(
        None,
        description="Compile each layer with torch.compile. If not set: on accelerators, not on CPUs (engine torch)."
        f" It is {_EXPERIMENTAL_ON_GPUS}",
    )
    sanity_steps: NonNegativeInt = Field(
        20,
        description="From this step on (or at the last step, if there are fewer), training stops when the smoothed loss"
        " exceeds the base model's by sanity_margin. It stops at step 1 when the base model's loss exceeds that of"
        " uniform guessing by as much. 0 turns both checks off; a loss that is not finite always stops training.",
    )
    sanity_margin: PositiveFloat = Field(2.0, description="Margin of these checks, in nats per token.")
    log_every_steps: PositiveInt = Field(1, description="Steps between lines of metrics.jsonl.")
    save_every_steps: PositiveInt = Field(100, description="Steps between checkpoints; the last step is always saved.")
    keep_checkpoints: PositiveInt = Field(2, description="How many complete checkpoints to keep, newest first.")
    async_save: bool = Field(
        False,
        description="Write checkpoints while training continues; needs host memory for a whole checkpoint of the node's"
        f" ranks. With engine torch it is {_EXPERIMENTAL_ON_GPUS}",
    )
    save_only_model: bool = Field(
        False,
        description="Save only the trained weights, at the end: smaller and faster, but a training that is interrupted"
        " starts again (engine torch).",
    )
    evaluate_every_steps: PositiveInt | None = Field(
        None,
        description="Steps between validation losses, over the rows held out by dataset.validation_share; with it, the"
        " base model's is measured first. If not set, the validation loss is measured once, at the end (engine torch).",
    )
    keep_best: bool = Field(
        False,
        description="Keep the weights with the lowest validation loss, and make the tuned model of them instead of the"
        " last ones (engine torch).",
    )
    early_stopping_patience: PositiveInt | None = Field(
        None,
        description="Stop after this many validation losses in a row that are not below the lowest one (engine torch).",
    )
    weights_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="dtype of the weights that keep_best and save_only_model save; a restart needs fp32 (engine"
        " torch).",
    )

    def compiles(self, on_accelerator: bool) -> bool:
        """Whether engine torch compiles layers."""
        return on_accelerator if self.compile is None else self.compile


class Parallelism(Section):
    """How the model is split over the ranks; the remaining ranks are data-parallel."""

    degrees: Literal["manual", "auto"] = Field(
        "manual",
        description="`auto` chooses tensor_parallel, pipeline_parallel and context_parallel: those that fit and, by an"
        " estimate, train most tokens a second (engine torch). `hyperpod-ft plan` shows the choice.",
    )
    tensor_parallel: PositiveInt | None = Field(
        None,
        description="Number of ranks, on one node, that share each layer's matrices. If not set: 8 on trn1, 4 on trn2,"
        " otherwise 1.",
    )
    pipeline_parallel: PositiveInt = Field(
        1,
        description="Number of ranks that share the layers as stages of a pipeline. With engine torch, the"
        " training.gradient_accumulation_steps micro batches of a step pass through it: at least as many as ranks.",
    )
    pipeline_schedule: Literal["1f1b", "interleaved", "gpipe"] = Field(
        "1f1b",
        description="Order of the micro batches in a pipeline (engine torch): `1f1b` (one forward, one backward),"
        " `interleaved` (1F1B with several stages on a rank: idle for less time, more communication), or `gpipe` (all"
        " forward passes first, which needs the most memory).",
    )
    virtual_pipeline_parallel: PositiveInt = Field(
        2, ge=2, description="Number of stages on each rank with pipeline_schedule `interleaved`."
    )
    context_parallel: PositiveInt = Field(
        1, description="Number of ranks that share each row's tokens, for long rows (engine torch)."
    )
    sequence_parallel: bool | None = Field(
        None,
        description="With tensor_parallel, divide the activations between attention and MLP over its ranks too, by"
        " position (engine torch; engine neuron has neuron.sequence_parallel). It saves memory and sends as many bytes."
        " If not set: when tensor_parallel x context_parallel divides dataset.max_length.",
    )
    ranks_per_node: PositiveInt | None = Field(
        None, description="Training processes per node; one per accelerator (logical NeuronCore or GPU) if not set."
    )
    sharding: Literal["auto", "replicated", "zero1", "zero2", "zero3"] = Field(
        "auto",
        description="What data-parallel ranks divide instead of each holding all of it (engine torch): nothing"
        " (`replicated`), the optimizer's state (`zero1`), gradients too (`zero2`), weights too (`zero3`). `auto`"
        " chooses the fastest that fits. docs/parallelism.md compares them. All are"
        f" {_EXPERIMENTAL_ON_GPUS}",
    )
    shard_ranks: PositiveInt | None = Field(
        None,
        description="Number of data-parallel ranks that divide it among themselves; the others repeat the same in"
        " groups of this size (hybrid sharding). If not set: all of them, or with `auto` those of a node if that fits.",
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        "none",
        description="What is kept in host memory (engine torch): with `optimizer` AdamW's state and fp32 weights,"
        " updated on the CPU; with `parameters` the weights too, uploaded layer by layer. It is"
        f" {_EXPERIMENTAL_ON_GPUS}",
    )


class Neuron(Section):
    """Settings of engine neuron; engine torch ignores them."""

    sequence_parallel: bool = Field(
        True,
        description="Divide the activations outside attention and MLP over the tensor-parallel ranks. Saves memory,"
        " and is required for bf16 with tensor parallelism.",
    )
    flash_attention: bool | None = Field(
        None,
        description="Use Neuron's flash attention kernel, for which dataset.max_length must be a multiple of 2048. If"
        " not set, it is used when that is the case.",
    )
    zero_1: bool = Field(True, description="ZeRO-1: shard the optimizer state over the data-parallel ranks.")
    master_weights: bool = Field(
        True, description="bf16 with ZeRO-1: keep fp32 weights in the optimizer and accumulate gradients in fp32."
    )
    stochastic_rounding: bool = Field(True, description="Round to bf16 stochastically.")
    fuse_qkv: bool = Field(False, description="Fuse the query, key and value projections into one matrix.")
    xser: bool = Field(
        True, description="Write each tensor of a checkpoint to a separate file, directly from the device."
    )
    precompile_steps: PositiveInt = Field(
        10,
        le=1000,
        description="Steps of the trial run in which `precompile` collects the graphs to compile; AWS recommends 10"
        " to 15.",
    )


class Merge(Section):
    """The merged model."""

    dtype: Literal["base", "bfloat16", "float16", "float32"] = Field(
        "base", description="dtype of the merged weights; `base` keeps that of each tensor of the base model."
    )
    max_shard_size_gb: PositiveFloat = Field(5.0, description="Maximum size of a safetensors file, in GB (1e9 bytes).")


class Generate(Section):
    """The comparison of the base model and the fine-tuned one after the merge."""

    prompts: tuple[str | dict[str, Any], ...] = Field(
        (),
        description="Prompts to answer: rows in the dataset's format, which are rendered as in training, or strings."
        " Where the rows are chats, a string is what the user says; otherwise it is continued as it is.",
    )
    max_new_tokens: PositiveInt = Field(64, description="Maximum length of an answer, in tokens.")
    train_samples: NonNegativeInt = Field(
        8,
        le=256,
        description="Number of training rows, sampled once, whose answers are compared with the expected ones.",
    )
    validation_samples: NonNegativeInt = Field(8, le=256, description="The same for validation rows.")


class RunConfig(Section):
    """One run file."""

    name: Annotated[
        str, matches(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "at most 64 letters, digits, dots, underscores and hyphens")
    ] = Field(description="Name of the run; used in paths and Slurm job names.")
    engine: EngineName = Field(
        description="`torch` (CPU, CUDA, trn2) or `neuron` (PyTorch/XLA on trn1, trn2); docs/trainium.md compares them."
    )
    seed: NonNegativeInt = Field(42, description="Seed of the data order, the adapters and dropout.")
    cluster: Cluster = Field(default_factory=Cluster)
    env: PythonEnvironment = Field(default_factory=PythonEnvironment)
    model: Model
    dataset: Dataset
    lora: Lora = Field(default_factory=Lora)
    dpo: Dpo = Field(default_factory=Dpo)
    training: Training = Field(default_factory=Training)
    parallelism: Parallelism = Field(default_factory=Parallelism)
    neuron: Neuron = Field(default_factory=Neuron)
    merge: Merge = Field(default_factory=Merge)
    generate: Generate = Field(default_factory=Generate)
    sagemaker: SageMaker | None = None
    deploy: Deploy | None = None

    @model_validator(mode="after")
    def _settings_go_together(self) -> "RunConfig":
        check_combinations(self)
        return self

    @property
    def root(self) -> Path:
        return Path(self.cluster.root)

    @property
    def flash_attention(self) -> bool:
        """Whether engine neuron uses Neuron's flash attention kernel: as set, or if the rows' length allows it."""
        given = self.neuron.flash_attention
        return self.dataset.max_length % FLASH_ATTENTION_LENGTH == 0 if given is None else given
