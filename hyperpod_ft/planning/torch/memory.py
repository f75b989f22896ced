"""Memory of a training step of engine torch: of decoders, and what differs for a T5."""

from dataclasses import dataclass, replace
from functools import cached_property

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.layout import Degrees, Sharding, copies_over_context
from hyperpod_ft.planning.lora import target_names
from hyperpod_ft.planning.memory import FP32, KeptTensors, Memory, StepMemory
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.stage_sizes import PipelineStageSize, pipeline_stage_sizes
from hyperpod_ft.planning.t5_shape import T5Shape
from hyperpod_ft.planning.torch import pipeline
from hyperpod_ft.planning.torch.sharded_state import ShardedState


def has_sequence_parallel(config: RunConfig, degrees: Degrees) -> bool:
    """Whether tensor-parallel ranks divide what lies between attention and MLP by position."""
    given, ranks = config.parallelism.sequence_parallel, degrees.tensor_parallel
    divides = ranks > 1 and config.dataset.max_length // degrees.context_parallel % ranks == 0
    return divides and given is not False


def loss_block(*, fused: bool) -> int:
    """Positions whose logits are in memory at once; `fused`: a compiler makes one pass of them.

    On a CPU, 256 to 1,024 were as fast, 64 were not. On an H200 with a trained head of 128,256 tokens, 256 took 115 ms
    for 8,192 positions, 1,024 took 63, 2,048 took 55 and 4,096 took 51.
    """
    return 2048 if fused else 256


@dataclass(frozen=True)
class TorchMemory(StepMemory):
    """Counts the memory of a run's training step of engine torch."""

    @cached_property
    def stages(self) -> tuple[PipelineStageSize, ...]:
        layers = pipeline.layers_of_ranks(self.config, self.degrees, self.shape)
        in_flight = pipeline.in_flight(self.config, self.degrees)
        return tuple(pipeline_stage_sizes(self.config, self.degrees, self.shape, layers, in_flight))

    @cached_property
    def kept(self) -> KeptTensors:
        """Sequence parallelism divides what lies between attention and MLP; their inputs are gathered."""
        shape, degrees = self.shape, self.degrees
        # what a compiler keeps of a norm is its choice: the most is counted
        compiled = self.config.training.compiles(self.config.instance.has_accelerators)
        return KeptTensors(
            outside_share=1 / degrees.tensor_parallel if has_sequence_parallel(self.config, degrees) else 1.0,
            input_share=1.0,
            attention=self._attention,
            # a fused gate is activated by transformers' code
            activated=any(len(parts) == 2 for parts in shape.family.columns.values()),
            normalized=compiled and self.config.training.method == "full",
            exchanged=self.element * (2 * shape.query_width + 2 * shape.key_width * key_value_copies(degrees, shape))
            if degrees.context_parallel > 1
            else 0.0,
            norm_input=FP32 if compiled else self.element,
        )

    def on_rank(self, stage: PipelineStageSize, sharding: Sharding) -> Memory:
        """Memory of a rank under a sharding.

        The loss has the logits of one block of positions only, in fp32, and if the model computes in bf16, in bf16 too
        or beside their gradient where a compiler fuses the loss; and the hidden states' gradient. Tensor-parallel ranks
        have as many more positions and as much less of the vocabulary.
        """
        state = ShardedState(self.config, self.degrees, self.shape, stage, sharding)
        ranks = self.degrees.tensor_parallel
        fused = self._fuses_loss and ranks == 1
        positions = min(self._loss_tokens, loss_block(fused=fused) * ranks)
        block = positions * self.shape.vocabulary_on_rank(ranks) * (2 * self.element if fused else self.in_fp32_too)
        logits = stage.last * (self._of_batch + block)
        return Memory(
            weights=state.weights,
            gradients=state.gradients,
            optimizer=state.optimizer,
            activations=self.activations(stage, logits),
            logits=logits,
        )

    @property
    def _fuses_loss(self) -> bool:
        """Whether a compiler fuses the loss of a head that is neither divided nor adapted."""
        config = self.config
        adapted = config.training.method == "lora" and "lm_head" in target_names(config.lora, self.shape.model_type)
        return config.instance.device == "cuda" and config.training.compiles(on_accelerator=True) and not adapted

    def on_fullest_rank(self, sharding: Sharding) -> float:
        """The bytes that the fullest rank needs."""
        # of identical ranks of a pipeline, the first has the most micro batches in memory
        different = {replace(stage, in_flight=0): stage for stage in reversed(self.stages)}
        return max(self.on_rank(stage, sharding).total for stage in different.values())

    def activations(self, stage: PipelineStageSize, logits: float) -> float:
        return super().activations(stage, logits) + self._pipeline(stage)

    @property
    def _loss_tokens(self) -> int:
        """Tokens of a micro batch that the loss reads."""
        return self.tokens

    @property
    def _of_batch(self) -> float:
        """Bytes that the loss keeps of a micro batch."""
        return self._loss_tokens * (self.last_norm + self.shape.hidden * self.element)

    def _pipeline(self, stage: PipelineStageSize) -> float:
        """Bytes that a pipeline adds."""
        if self.degrees.pipeline_parallel == 1:
            return 0.0
        config = self.config
        # torch has a tensor for each stage's input and its gradient, and for each micro batch
        stages, micro_batches = pipeline.stages_per_rank(config), config.training.gradient_accumulation_steps
        received = 2 * stages * micro_batches * self.tokens * self.shape.hidden * self.element
        if config.parallelism.pipeline_schedule != "gpipe" or not stage.last:
            return received
        # the loss computes its gradients in the forward pass: that of the output matrix waits for the backward pass
        matrix = self.shape.vocabulary_on_rank(self.degrees.tensor_parallel) * self.shape.hidden * FP32
        head = matrix if stage.whole_ends else 0
        return received + (stage.in_flight - 1) * (self._of_batch + head)

    @property
    def _attention(self) -> float:
        """Bytes per token: query, key, value; and the output, as computed and as o_proj's input."""
        shape, element = self.shape, self.element
        keys = shape.key_width * key_value_copies(self.degrees, shape)
        total: float = element * (3 * shape.query_width + 2 * keys) + self._scores
        fused = any(len(parts) == 3 or "triples" in parts for parts in shape.family.columns.values())
        if fused and not shape.positions:
            # the value keeps all that its linear computed, besides queries and keys that were rotated
            total += element * (shape.query_width + keys)
        return total

    @property
    def _scores(self) -> float:
        """Bytes per token of what attention keeps of each pair of tokens, where no kernel avoids it."""
        config, shape, element = self.config, self.shape, self.element
        softmax = self.in_fp32_too  # computed in fp32
        if shape.softcap:
            # no kernel caps scores: they are there after tanh; keys and values are repeated
            return (element + softmax) * shape.heads * config.dataset.max_length + element * 2 * shape.query_width
        if config.instance.is_neuron:
            # a dense mask separates the documents of a row; it is not known whether the compiler avoids the softmax
            return softmax * shape.heads * config.dataset.max_length
        return 0.0


@dataclass(frozen=True)
class T5Memory(TorchMemory):
    """What differs for a T5, which has no pipeline.

    Layers are counted as if all had the same size, though those of the decoder have one more attention.
    """

    shape: T5Shape

    @cached_property
    def stages(self) -> tuple[PipelineStageSize, ...]:
        """The whole model, after tensor parallelism."""
        shape, lora, tensor = self.shape, self.config.lora, self.degrees.tensor_parallel
        targets = target_names(lora, shape.model_type)
        linears = {name: sum(shape.times(name)) * sides[0] * sides[1] for name, sides in shape.matrices.items()}
        ends = shape.end_parameters(tensor)
        parameters = shape.layers_parameters - sum(linears.values()) * (tensor - 1) // tensor
        adapters = sum(shape.adapters(targets, lora.r)) + lora.dora * sum(
            sum(shape.times(name)) * outputs for name, (_, outputs) in shape.matrices.items() if name in targets
        )
        whole = PipelineStageSize(
            layers=shape.layers,
            layer_parameters=parameters // shape.layers,
            end_parameters=ends,
            quantized=sum(linears[name] for name in linears if name in targets and lora.quantization != "none"),
            trainable=adapters if self.config.training.method == "lora" else parameters + ends,
            whole_ends=0 if self.config.training.method == "lora" else ends,
            in_flight=1,
            last=True,
        )
        return (whole,)

    @property
    def _loss_tokens(self) -> int:
        return self.config.training.micro_batch_size * self._target_length

    @property
    def _target_length(self) -> int:
        return self.config.dataset.max_target_length or 0

    def activations(self, stage: PipelineStageSize, logits: float) -> float:
        """Of accelerators, which compile layers and make a bias of [rows, heads, length, length] for each stack."""
        training, length, shape, element = (
            self.config.training,
            self.config.dataset.max_length,
            self.shape,
            self.element,
        )
        rows, source, target = training.micro_batch_size, training.micro_batch_size * length, self._loss_tokens
        tensor = self.degrees.tensor_parallel
        scores = rows * (shape.heads // tensor) * (length**2 + self._target_length**2)
        # and their gradients, where they are trained
        biases = (2 if training.method == "full" else 1) * element * scores
        norm = shape.hidden * (FP32 + (1 + (training.method == "full")) * element)
        dropped = shape.hidden  # a mask of the output of attention and of MLP, one byte each
        queries = element * shape.query_width / tensor
        units = (element * (4 if shape.gated else 2) + 1) * shape.intermediate / tensor
        own = 2 * norm + 2 * dropped + 5 * queries + units  # attention: q, k, v, and the output twice
        cross = norm + dropped + 3 * queries  # keys and values are the encoder's tokens
        whole = {"encoder": source * own, "decoder": target * (own + cross) + source * 2 * queries}
        given = {"encoder": source * shape.hidden * element, "decoder": target * shape.hidden * element}
        counts = {"encoder": shape.encoder_layers, "decoder": shape.decoder_layers}
        # the second attention: query, output and what `o` makes of it; keys and values
        cross_products = element * shape.hidden + 2 * queries
        inside = 4 * shape.query_width + (2 if shape.gated else 1) * shape.intermediate
        own_products = element * (2 * shape.hidden + inside / tensor)
        products = {
            "encoder": source * own_products,
            "decoder": target * (own_products + cross_products) + source * 2 * queries,
        }
        kept = biases + sum(
            self.kept_by_layers(count, whole[stack], given[stack], products[stack]) for stack, count in counts.items()
        )
        if training.activation_checkpointing == "none":
            return kept
        # one layer is recomputed, after the loss has freed its memory
        return kept + max(0.0, max(whole.values()) - logits)


def key_value_copies(degrees: Degrees, shape: ModelShape) -> int:
    """How many of the ranks that share a row hold each key/value head in attention."""
    return copies_over_context(max(1, shape.kv_heads // degrees.tensor_parallel), degrees.context_parallel)
