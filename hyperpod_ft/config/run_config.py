"""RunConfig: a run file. Unknown keys are refused, values are checked, and the result is frozen.

Its keys are in sections/. `docs/run-file.md` is generated from them.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hyperpod_ft.config.fields import NonNegativeInt, Section, matches
from hyperpod_ft.config.flat_keys import flattened
from hyperpod_ft.config.instances import CATALOGUE, Instance
from hyperpod_ft.config.sections.cluster import Cluster
from hyperpod_ft.config.sections.dataset import Dataset
from hyperpod_ft.config.sections.deploy import Deploy
from hyperpod_ft.config.sections.dpo import Dpo
from hyperpod_ft.config.sections.environment import PythonEnvironment
from hyperpod_ft.config.sections.evaluation import Eval
from hyperpod_ft.config.sections.generate import Generate
from hyperpod_ft.config.sections.lora import Lora
from hyperpod_ft.config.sections.merge import Merge
from hyperpod_ft.config.sections.model import Model
from hyperpod_ft.config.sections.neuron import Neuron
from hyperpod_ft.config.sections.parallelism import Parallelism
from hyperpod_ft.config.sections.sagemaker import SageMaker
from hyperpod_ft.config.sections.tracking import Tracking
from hyperpod_ft.config.sections.training import Training
from hyperpod_ft.config.setting_combinations import FLASH_ATTENTION_LENGTH, check_combinations

EngineName = Literal["torch", "neuron"]
StageName = Literal[
    "env", "download", "dataset", "tasks", "precompile", "train", "consolidate", "merge", "generate", "eval"
]


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
    tracking: Tracking = Field(default_factory=Tracking)
    eval: Eval | None = None
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
    def instance(self) -> Instance:
        """The hardware of a training node."""
        return CATALOGUE[self.cluster.instance_type]

    @property
    def store(self) -> str | None:
        """The S3 prefix in which training jobs keep the run, if they do not mount a file system."""
        return self.sagemaker.store if self.sagemaker else None

    @property
    def flash_attention(self) -> bool:
        """Whether engine neuron uses Neuron's flash attention kernel: as set, or if the rows' length allows it."""
        given = self.neuron.flash_attention
        return self.dataset.max_length % FLASH_ATTENTION_LENGTH == 0 if given is None else given

    def by_key(self) -> dict[str, Any]:
        """Each setting as JSON has it, by `section.key`."""
        return flattened(self.model_dump(mode="json"))
