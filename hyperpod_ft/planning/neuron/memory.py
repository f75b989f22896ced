"""Memory of a training step of engine neuron: optimum-neuron on neuronx-distributed."""

from dataclasses import dataclass
from functools import cached_property

from hyperpod_ft.planning.memory import FP32, KeptTensors, Memory, StepMemory
from hyperpod_ft.planning.neuron.limits import uses_flash_attention
from hyperpod_ft.planning.stage_sizes import PipelineStageSize, pipeline_stage_sizes


@dataclass(frozen=True)
class NeuronMemory(StepMemory):
    """Counts the memory of a run's training step of engine neuron."""

    @cached_property
    def stages(self) -> tuple[PipelineStageSize, ...]:
        """The last ones have the layers left over, and the schedule is 1F1B."""
        stages, layers = self.degrees.pipeline_parallel, self.shape.layers
        # in a pipeline, optimum-neuron makes each row a micro batch
        micro_batches = self.config.training.micro_batch_size * self.config.training.gradient_accumulation_steps
        return tuple(
            pipeline_stage_sizes(
                self.config,
                self.degrees,
                self.shape,
                layers_of=[layers // stages + (stage >= stages - layers % stages) for stage in range(stages)],
                # in stage k of p, p - k micro batches are in flight (section 4.2.3 of arXiv:2205.05198)
                in_flight=[min(stages - stage, micro_batches) for stage in range(stages)],
            )
        )

    @property
    def tokens(self) -> int:
        """In a pipeline, each row is a micro batch."""
        return self.config.dataset.max_length if self.degrees.pipeline_parallel > 1 else super().tokens

    @cached_property
    def kept(self) -> KeptTensors:
        share_of_tokens = 1 / self.degrees.tensor_parallel if self.config.neuron.sequence_parallel else 1.0
        return KeptTensors(
            outside_share=share_of_tokens,
            input_share=share_of_tokens,
            attention=self._attention,
            adapter_input=FP32 if self.element < FP32 else 0,  # adapters are fp32
        )

    def on_rank(self, stage: PipelineStageSize) -> Memory:
        """bf16 weights; with ZeRO-1 the optimizer has its own copy, and shards all of its state.

        The vocabulary is divided: the loss keeps logits, their fp32 copy, and the softmax.
        """
        config, degrees, lora = self.config, self.degrees, self.config.training.method == "lora"
        trained = FP32 if lora else self.element  # PEFT keeps adapters in fp32
        frozen = stage.parameters * self.element if lora else 0
        # only with bf16: with ZeRO-1, optimum-neuron would give an fp32 model a bf16 optimizer
        if config.neuron.zero_1 and config.training.precision == "bf16":
            own = FP32 if config.neuron.master_weights else 2
            accumulated = FP32 if config.neuron.master_weights else trained
            gradients = stage.trainable * (accumulated + own / degrees.data_parallel)
            optimizer = stage.trainable * 3 * own / degrees.data_parallel
        else:
            gradients = float(stage.trainable * trained)
            optimizer = float(stage.trainable * 2 * trained)
        loss = self.shape.vocabulary / degrees.tensor_parallel * (self.element + 2 * FP32)
        logits = stage.last * self.tokens * (self.last_norm + loss)
        return Memory(
            weights=frozen + stage.trainable * trained,
            gradients=gradients,
            optimizer=optimizer,
            activations=self.activations(stage, logits),
            logits=logits,
        )

    @property
    def _attention(self) -> float:
        """Bytes per token: query, key and value at the width of the queries, and the output as o_proj's input.

        A flash attention kernel keeps its output too; otherwise the softmax is kept, in fp32 and in the model's dtype.
        """
        shape = self.shape
        if uses_flash_attention(self.config):
            return self.element * 5 * shape.query_width
        softmax = shape.heads * self.config.dataset.max_length * self.in_fp32_too
        return self.element * 4 * shape.query_width + softmax
