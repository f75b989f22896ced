"""What a rank of engine torch keeps of weights, gradients and optimizer state under a sharding (torch/sharding.py)."""

from dataclasses import dataclass

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.layout import BUCKET_BYTES, Degrees, Sharding
from hyperpod_ft.planning.memory import FP32, element_bytes
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.stage_sizes import PipelineStageSize

NF4_BYTES = 4.5 / 8  # bytes of a parameter in NF4: 4 bits, and an fp32 scale for 64
# Bytes of both moments; int8 has a scale for 256 elements of each.
_MOMENTS = {"fp32": 8.0, "bf16": 4.0, "int8": 2 + 8 / 256}


@dataclass(frozen=True)
class ShardedState:
    """Bytes of the state of training on a rank."""

    config: RunConfig
    degrees: Degrees
    shape: ModelShape
    stage: PipelineStageSize
    sharding: Sharding

    @property
    def weights(self) -> float:
        """Adapters are fp32."""
        stage, sharding = self.stage, self.sharding
        base, quantized = stage.parameters - stage.quantized, stage.quantized * NF4_BYTES
        if not sharding.by_layer:
            return base * self._element + self._adapters * FP32 + quantized
        layers, bucket = self._shared - stage.end_parameters, self._weights_in_bucket
        # zero3 holds the current bucket, the next one, which is prefetched, and one as received. zero2 receives its
        # weights before any gradient exists. Embedding and output matrix stay gathered
        gathered = layers if sharding.mode == "zero2" else min(layers + bucket, 3 * bucket)
        on_device = 0.0 if sharding.offload == "parameters" else self._sharded(self._at_rest, self._experts_at_rest)
        return on_device + (gathered + stage.end_parameters) * self._element + quantized

    @property
    def gradients(self) -> float:
        """Gradients are fp32. While a bucket is reduced, it is in memory twice: as computed and as sent.

        zero2 also holds weights as received during the forward pass; they are released before the gradients exist.
        """
        whole, ranks = float(self.stage.trainable * FP32), self.sharding.shard_ranks
        accumulated = self.config.training.gradient_accumulation_steps > 1
        if self.sharding.by_layer:
            return self._gradients_by_layer(whole, accumulated)
        on_host = self.sharding.offload != "none"
        if self.degrees.weight_replicas == 1 and not on_host:
            return whole
        bucket = min(whole, max(BUCKET_BYTES, FP32 * self._largest))  # a parameter may be larger than a bucket
        # whole ones are there until the last micro batch of a step; on one shard rank, what was sent is what is kept
        if accumulated or (ranks == 1 and not on_host):
            return whole + bucket
        return 2 * bucket + (0.0 if on_host else self._sharded(whole, self.stage.trained_experts * FP32))

    def _gradients_by_layer(self, whole: float, accumulated: bool) -> float:
        """The same with FSDP2. `whole`: bytes of all gradients of the stage, before they are sharded."""
        stage, zero2 = self.stage, self.sharding.mode == "zero2"
        ends = stage.whole_ends
        layers = stage.trainable - ends
        in_bucket = self._layers_in_bucket / stage.layers * layers
        on_host = self.sharding.offload == "parameters"
        sharded = 0.0 if on_host else self._sharded(whole, self.stage.trained_experts * FP32)
        sent = self._element + FP32
        kept = sharded if accumulated else 0.0  # during a micro batch
        # what was received of a bucket is released after the next one was
        received = 2 * self._weights_in_bucket * self._element if zero2 else 0.0
        # the backward pass begins with the last layers, and ends with embedding and output matrix, when zero2 has
        # released the layers
        begins = kept + in_bucket * sent
        released = (self._shared - stage.end_parameters) * self._element if zero2 else 0.0
        return max(kept + received, begins, sharded + ends * sent - released)

    @property
    def optimizer(self) -> float:
        """Moments, and fp32 weights where those that compute are bf16 (with FSDP2 they are the sharded weights)."""
        if self.sharding.offload != "none":
            return 0.0
        stage, of_rounded = self.stage, FP32 if self._element < FP32 and not self.sharding.by_layer else 0
        moments = _MOMENTS[self.config.training.optimizer_state]
        whole = stage.trainable * moments + (stage.trainable - self._adapters) * of_rounded
        return self._sharded(whole, stage.trained_experts * (moments + (0 if self._lora else of_rounded)))

    @property
    def saved(self) -> float:
        """The fp32 weights and the moments, which a checkpoint has, wherever they are."""
        each = FP32 + _MOMENTS[self.config.training.optimizer_state]
        return self._sharded(self.stage.trainable * each, self.stage.trained_experts * each)

    def _sharded(self, whole: float, of_experts: float) -> float:
        """Bytes that a rank has after sharding, of `whole` before it; `of_experts`: those of its experts."""
        ranks = self.sharding.shard_ranks
        return (whole - of_experts) / ranks + of_experts / self.degrees.expert_shard_ranks(ranks)

    @property
    def _lora(self) -> bool:
        return self.config.training.method == "lora"

    @property
    def _element(self) -> int:
        return element_bytes(self.config)

    @property
    def _adapters(self) -> int:
        """Parameters of adapters: what is trained whole beside them is the model's own."""
        return self.stage.trainable - self.stage.whole_ends if self._lora else 0

    @property
    def _largest(self) -> int:
        """Elements of the largest trained parameter; 0 for adapters. Embedding and output matrix are equally large."""
        ranks = self.degrees.tensor_parallel
        if not self._lora:
            return self.shape.largest_parameter(ranks, self.degrees.expert_parallel)
        return min(self.stage.whole_ends, self.shape.vocabulary_on_rank(ranks) * self.shape.hidden)

    @property
    def _shared(self) -> int:
        """Parameters that FSDP2 stores: all but those in 4 bits."""
        return self.stage.parameters - self.stage.quantized + self._adapters

    @property
    def _at_rest(self) -> int:
        """Bytes of these parameters as FSDP2 stores them: fp32 where they are trained."""
        frozen = self.stage.parameters - self.stage.quantized - self.stage.whole_ends if self._lora else 0
        return frozen * self._element + (self._shared - frozen) * FP32

    @property
    def _experts_at_rest(self) -> int:
        """Of these, those of the rank's experts."""
        frozen = self.stage.experts if self._lora else 0
        return frozen * self._element + self.stage.trained_experts * FP32

    @property
    def _weights_in_bucket(self) -> float:
        """Parameters."""
        return self._layers_in_bucket / self.stage.layers * (self._shared - self.stage.end_parameters)

    @property
    def _layers_in_bucket(self) -> int:
        layer = self._at_rest / self._shared * self.stage.layer_parameters
        return max(1, min(self.stage.layers, int(BUCKET_BYTES / layer)))
