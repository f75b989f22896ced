"""The training loop, its optimizer, and what is trained: sections `training`, `lora`, `dpo`, `kto` and `teacher`."""

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from hyperpod_ft.config.fields import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Revision,
    Section,
    Share,
    Source,
)
from hyperpod_ft.config.sections.inputs import Pinned


class Training(Section):
    """The training loop and optimizer."""

    method: Literal["lora", "full"] = Field("lora", description="Train LoRA adapters, or all parameters.")
    objective: Literal["sft", "dpo", "kto", "grpo", "rloo", "distillation", "reward"] = Field(
        "sft",
        description="What is learned (docs/methods.md): `sft`, answers; `dpo`, preferences (not engine neuron). With"
        " engine trl: `kto`, labels; `grpo` and `rloo`, rewards of sampled answers; `distillation`, a teacher's"
        " probabilities; `reward`, to score answers.",
    )
    epochs: PositiveFloat = Field(3, description="Passes over the training rows; may be a fraction.")
    max_steps: PositiveInt | None = Field(None, description="Optimizer steps; overrides epochs.")
    micro_batch_size: PositiveInt = Field(
        1,
        description="Packed rows per forward pass on each data-parallel rank; with format prompt, sampled answers.",
    )
    gradient_accumulation_steps: PositiveInt = Field(1, description="Forward passes per optimizer step.")
    learning_rate: PositiveFloat = Field(2e-4, description="Peak learning rate of AdamW.")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="Learning rate schedule after the warm-up."
    )
    warmup_share: Share = Field(0.03, description="Fraction of the steps over which the learning rate rises from 0.")
    weight_decay: NonNegativeFloat = Field(0.0, description="AdamW's decoupled weight decay.")
    optimizer_state: Literal["fp32", "bf16", "int8"] = Field(
        "fp32",
        description="How AdamW's moments are stored between steps (engine torch): `bf16` takes half the memory of"
        " `fp32`, `int8` (quantized in blocks) about a quarter.",
    )
    adam_beta1: Share = Field(0.9, description="AdamW's first-moment decay.")
    adam_beta2: Share = Field(0.999, description="AdamW's second-moment decay.")
    max_grad_norm: NonNegativeFloat = Field(1.0, description="Norm to which gradients are clipped; 0: no clipping.")
    precision: Literal["bf16", "fp32"] = Field(
        "bf16",
        description="`bf16`, for fp16 models too, computes in bfloat16 and keeps adapters (engines torch and trl: all"
        " trained weights) in fp32; `fp32` computes in fp32.",
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        "none",
        description="What layers recompute in the backward pass, to save memory. `none`: nothing. `selective`: all but"
        " matrix products and attention (engine torch). `full`: everything.",
    )
    activation_checkpointing_every: PositiveInt = Field(
        1, description="Apply it to every k-th layer only (engine torch)."
    )
    activation_offload: bool = Field(
        False,
        description="Keep what autograd saves of each layer in host memory until the backward pass (engine torch). With"
        " activation_checkpointing, that is the layer's input.",
    )
    compile: bool | None = Field(
        None,
        description="Compile each layer with torch.compile (engine torch). If not set: on accelerators only.",
    )
    sanity_steps: NonNegativeInt = Field(
        20,
        description="Training stops at step 1 if the base model's loss exceeds that of uniform guessing by"
        " sanity_margin. From step sanity_steps on, or at the last step, it also stops if the smoothed loss exceeds"
        " the base model's by that margin. 0 turns both checks off.",
    )
    sanity_margin: PositiveFloat = Field(
        2.0,
        description="In nats per token; with dpo and reward, per pair. Not checked: losses of kto, of sampled answers,"
        " and of ipo, sppo_hard and loss_weights (section trl).",
    )
    log_every_steps: PositiveInt = Field(1, description="Steps between lines of metrics.jsonl.")
    save_every_steps: PositiveInt = Field(100, description="Steps between checkpoints; the last step is always saved.")
    keep_checkpoints: PositiveInt = Field(2, description="Number of complete checkpoints to keep.")
    async_save: bool = Field(
        False,
        description="Write checkpoints while training continues (not engine trl). Needs host memory for one checkpoint"
        " of the node's ranks.",
    )
    memory_checkpoint_every_steps: PositiveInt | None = Field(
        None,
        description="Steps between checkpoints in the nodes' memory, fewer than save_every_steps (engine torch;"
        " docs/reliability.md#memory-checkpoints).",
    )
    save_only_model: bool = Field(
        False,
        description="Save only the trained weights, once, at the end (not engine neuron). An interrupted training then"
        " starts again.",
    )
    validate_every_steps: PositiveInt | None = Field(
        None,
        description="Steps between validation losses, the first before training (not engine neuron). If not set: once,"
        " at the end.",
    )
    validate_rouge_rows: PositiveInt | None = Field(
        None,
        le=256,
        description="Also answer that many validation samples at each validation, with at most"
        " `generate.max_new_tokens` tokens, and score the answers by ROUGE as stage generate does (T5, with whole"
        " weights on each rank).",
    )
    keep_best: bool = Field(
        False,
        description="Make the tuned model from the weights with the lowest validation loss; needs"
        " validate_every_steps.",
    )
    early_stopping_patience: PositiveInt | None = Field(
        None,
        description="Stop after this many validation losses in a row that do not improve on the lowest; needs"
        " validate_every_steps.",
    )
    weights_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="dtype of the weights that keep_best and save_only_model save (engine torch). A restart needs"
        " fp32.",
    )

    @field_validator("precision", mode="before")
    @classmethod
    def _is_not_fp16(cls, given: Any) -> Any:
        if given in ("fp16", "float16", "half"):
            raise ValueError(
                "the kit does not compute in fp16; set bf16, in which it also trains models stored in fp16"
            )
        return given

    @property
    def samples_answers(self) -> bool:
        """Whether the model learns from its answers to prompts."""
        return self.has_rewards or self.objective == "distillation"

    @property
    def has_rewards(self) -> bool:
        """Whether it learns from what functions say of them."""
        return self.objective in ("grpo", "rloo")

    def compiles(self, on_accelerator: bool) -> bool:
        """Whether engine torch compiles layers."""
        return on_accelerator if self.compile is None else self.compile


class Lora(Section):
    """LoRA adapters, as PEFT defines them."""

    r: PositiveInt = Field(16, description="Rank of the adapters.")
    alpha: PositiveFloat = Field(32, description="Scaling: the update is multiplied by alpha / r.")
    dropout: Share = Field(0.0, description="Dropout on the input of the adapters.")
    target_modules: tuple[str, ...] | None = Field(
        None,
        description="Names of the linear modules and embeddings (not engine trl) to adapt. If not set: all linear"
        " layers of attention and MLP (docs/methods.md); for T5, `q` and `v`. `[]`, beside `target_parameters`: none.",
    )
    target_parameters: tuple[str, ...] = Field(
        (),
        description="Names of parameters that hold a matrix for each expert, to adapt too: `mlp.experts.gate_up_proj`,"
        " `mlp.experts.down_proj` (engine torch; docs/models.md#lora-for-experts).",
    )
    modules_to_save: tuple[str, ...] = Field(
        (),
        description="The embedding, the output layer or both, to train whole: `[embed_tokens, lm_head]` (not engine"
        " neuron; docs/methods.md).",
    )
    image_tower: bool = Field(
        False,
        description="With dataset.images: adapters in what reads images too (Qwen3-VL).",
    )
    rslora: bool = Field(False, description="Rank-stabilized LoRA: scale by alpha / sqrt(r).")
    dora: bool = Field(False, description="DoRA: also train the norm of each output's weights (not engine neuron).")
    plus_ratio: PositiveFloat = Field(
        1.0,
        description="LoRA+: the learning rate of lora_B is this many times training.learning_rate (engine torch). The"
        " paper suggests 16.",
    )
    quantization: Literal["none", "nf4"] = Field(
        "none",
        description="`nf4` keeps weights with adapters in 4 bits while training, except the output layer's (QLoRA)."
        " Engine torch without tensor parallelism.",
    )

    @model_validator(mode="after")
    def _adapts_something(self) -> "Lora":
        if self.target_modules == () and not self.target_parameters:
            raise ValueError("target_modules: names nothing; name modules, or set target_parameters")
        if both := sorted(self.given_names & last_parts(self.modules_to_save)):
            raise ValueError(f"modules_to_save: {both[0]} is trained whole; remove it here or from target_modules")
        for key in ("dropout", "dora") if self.target_parameters else ():
            if getattr(self, key):
                raise ValueError(f"{key}: PEFT has none for target_parameters; remove one of them")
        if self.target_parameters and self.quantization != "none":
            raise ValueError("quantization: keeps no parameters of experts in 4 bits; remove it or target_parameters")
        return self

    @property
    def given_names(self) -> frozenset[str]:
        """The last components of the names in `target_modules`."""
        return last_parts(self.target_modules or ())


def last_parts(names: Iterable[str]) -> frozenset[str]:
    """The last component of each module name."""
    return frozenset(name.rpartition(".")[2] for name in names)


class Dpo(Section):
    """Direct preference optimization (training.objective dpo)."""

    beta: PositiveFloat = Field(
        0.1, description="Scale of the rewards: the higher, the closer the model stays to its starting point."
    )
    label_smoothing: Annotated[Share, Field(lt=0.5)] = Field(
        0.0, description="Assumed share of pairs with chosen and rejected swapped (conservative DPO; engine torch)."
    )


class Kto(Section):
    """Kahneman-Tversky optimization (training.objective kto)."""

    beta: PositiveFloat = Field(0.1, description="As `dpo.beta`.")
    desirable_weight: PositiveFloat = Field(
        1.0,
        description="Weight of each completion that is labeled true. TRL advises that this weight times their number be"
        " 1 to 1.33 times `undesirable_weight` times the number of those labeled false.",
    )
    undesirable_weight: PositiveFloat = Field(1.0, description="Weight of each completion that is labeled false.")


class Teacher(Pinned):
    """The model to learn from (training.objective distillation)."""

    source: Source = Field(description="As `model.source`, with its vocabulary.")
    revision: Revision | None = Field(None, description="As `model.revision`.")
    beta: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="0: forward KL divergence; 1: reverse; between: generalized Jensen-Shannon."
    )


def total_steps(training: Training, rows: int, rows_per_step: int) -> int:
    """Number of optimizer steps: `max_steps`, or that of `epochs` passes over `rows`, rounded up."""
    return training.max_steps or max(1, math.ceil(training.epochs * rows / rows_per_step))


def learning_rate(training: Training, step: int, steps: int) -> float:
    """The learning rate of step `step` (1 .. `steps`).

    Rises linearly over the first ceil(warmup_share * steps) steps, the last of which has the peak; then it is constant,
    or falls linearly or along half a cosine, peak * (1 + cos(pi * share)) / 2 (Loshchilov & Hutter, arXiv:1608.03983,
    without restarts). It would reach 0 on the step after the last, so that every step trains.
    """
    peak = training.learning_rate
    warmup = math.ceil(training.warmup_share * steps)
    if step <= warmup:
        return peak * step / warmup
    share = (step - warmup) / (steps - warmup + 1)
    if training.schedule == "constant":
        return peak
    if training.schedule == "linear":
        return peak * (1 - share)
    return peak * (1 + math.cos(math.pi * share)) / 2
