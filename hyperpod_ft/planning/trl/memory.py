"""Memory of a training step of engine trl: transformers' modules in autocast, DDP or FSDP2, TRL's fused loss."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from hyperpod_ft.planning.layout import Sharding
from hyperpod_ft.planning.memory import FP32, KeptTensors, Memory, StepMemory
from hyperpod_ft.planning.stage_sizes import PipelineStageSize, pipeline_stage_sizes
from hyperpod_ft.planning.trl.settings import attention, has_fp32_weights, has_reference

# Bytes that an optimizer keeps of a trained parameter; Adafactor keeps a row and a column of each matrix.
_STATE: Mapping[str, int] = {"adagrad": 4, "rmsprop": 4, "adafactor": 0, "sgd": 0}
_ADAMW = 8
# The loss computes the logits of so many positions and tokens at once (trl/kernels/chunked_logprob.py).
_TILE = 4096 * 32768


@dataclass(frozen=True)
class TrlMemory(StepMemory):
    """Counts the memory of a run's training step of engine trl. Nothing of it was measured on an accelerator."""

    @cached_property
    def stages(self) -> tuple[PipelineStageSize, ...]:
        # a reward model has one row in place of the output matrix
        shape = replace(self.shape, tied=True) if self._scores else self.shape
        return tuple(pipeline_stage_sizes(self.config, self.degrees, shape, [shape.layers], [1]))

    @property
    def _scores(self) -> bool:
        return self.config.training.objective == "reward"

    @cached_property
    def kept(self) -> KeptTensors:
        return KeptTensors(
            outside_share=1.0,
            input_share=1.0,
            attention=self._attention,
            # PEFT casts the input of an adapter to its dtype, and autocast casts it back
            adapter_input=self.element if self.element < FP32 else 0,
        )

    def on_rank(self, stage: PipelineStageSize, sharding: Sharding) -> Memory:
        """Trained weights, gradients and the optimizer's state are fp32.

        Without sharding, autocast keeps a bf16 copy of fp32 matrices until the backward pass, and DDP a second copy of
        the gradients. FSDP2 gathers two layers at once, with zero2 all of them; embedding and output matrix; and it has
        a layer's gradients as computed and as sent. The loss has a tile of the logits, in bf16 and fp32, and the
        gradient of the hidden states, in fp32. The reference is sharded as one layer; a teacher is whole on every rank.
        """
        config, lora = self.config, self.config.training.method == "lora"
        copies = self.element if self.element < FP32 and not sharding.by_layer else 0
        frozen = 0.0
        if lora:
            frozen = stage.parameters * (FP32 if has_fp32_weights(config) else self.element)
            recomputed = config.training.activation_checkpointing == "full"
            # autocast's copy of a frozen fp32 matrix is kept for the backward pass of its layer
            cast = stage.layer_parameters if recomputed else stage.parameters
            frozen += cast * copies if has_fp32_weights(config) else 0
        weights = float(frozen + stage.trainable * (FP32 + copies))
        gradients, ranks = float(stage.trainable * FP32), sharding.shard_ranks
        reference = stage.parameters * (FP32 / ranks + (self.element if sharding.by_layer else copies))
        others = has_reference(config) * reference + self.shape.teacher * self.element
        if sharding.by_layer:
            layers = stage.layers if sharding.mode == "zero2" else min(2, stage.layers)
            gathered = layers * stage.layer_parameters * self.element + stage.end_parameters * FP32
            sent = (stage.trainable - stage.whole_ends) / stage.layers + stage.whole_ends
            weights, gradients = weights / ranks + gathered, gradients / ranks + sent * self.in_fp32_too
        elif self.degrees.data_parallel > 1:
            gradients *= 2
        models = 0 if self._scores else 2 if self.shape.teacher else 1
        tile = min(_TILE, self.tokens * self.shape.vocabulary) * self.in_fp32_too * models
        logits = self.tokens * (self.last_norm + self.shape.hidden * FP32) + tile
        return Memory(
            weights=weights + others,
            gradients=gradients,
            optimizer=stage.trainable * _STATE.get(config.trl.get("optim", ""), _ADAMW) / ranks,
            activations=max(self.activations(stage, logits), self._cache),
            logits=logits,
        )

    @property
    def _length(self) -> int:
        """Tokens of a row; of an answer with its prompt."""
        answer = self.config.sampling.max_completion_length if self.config.training.samples_answers else 0
        return self.config.dataset.max_length + answer

    @property
    def tokens(self) -> int:
        return self.config.training.micro_batch_size * self._length

    @property
    def _cache(self) -> float:
        """Bytes of keys and values while all answers of a step are sampled, before anything is kept to be trained.

        Those of vLLM are in its own share.
        """
        training = self.config.training
        if not training.samples_answers or self.config.vllm_share:
            return 0
        tokens = self.tokens * training.gradient_accumulation_steps
        return float(2 * tokens * self.shape.layers * self.shape.key_width * self.element)

    @property
    def _attention(self) -> float:
        """Bytes per token: query, key and value at the width of the queries, and the output as o_proj's input too.

        SDPA keeps the mask of a layer as numbers, for all heads together; eager attention the softmax.
        """
        shape, length, named = self.shape, self._length, attention(self.config)
        scores = {"sdpa": self.element, "eager": shape.heads * self.in_fp32_too}.get(named, 0) * length
        return self.element * 5 * shape.query_width + scores
