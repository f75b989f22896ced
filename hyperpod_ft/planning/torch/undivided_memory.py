"""Memory of a training step of models that are a list of parameters: mixtures of experts, and types without a row.

A token leaves the model's width by some matrices of a layer and returns to it by others, in attention as in an MLP. For
the backward pass, norms keep their input, attention and MLP theirs, the first matrices their outputs, and the last ones
their inputs, as computed and as multiplied: for a Llama, that is `StepMemory._layer`. Each expert that a token passes
through (k of them) keeps its own copies of its input and of its output, which the router weighs: with experts of width
i, k (2 h + 4 i) elements, of frozen ones k (h + 3 i).
"""

from dataclasses import dataclass
from functools import cached_property

from hyperpod_ft.planning.lora import targets, whole_modules
from hyperpod_ft.planning.stage_sizes import PipelineStageSize
from hyperpod_ft.planning.torch.memory import TorchMemory
from hyperpod_ft.planning.undivided.shape import Parameters, UndividedShape, adapter_parameters

_NORMS = 2  # of a layer, at the model's width
_LEAVING = ("q", "k", "v")  # the first letter of matrices that leave the width, where widths are equal


@dataclass(frozen=True)
class UndividedMemory(TorchMemory):
    """What differs for a model that neither tensor parallelism nor a pipeline divides."""

    shape: UndividedShape

    @cached_property
    def stages(self) -> tuple[PipelineStageSize, ...]:
        """The whole model, with this rank's experts."""
        shape, lora, ranks = self.shape, self.config.lora, self.degrees.expert_parallel
        ends, experts = shape.parameters - shape.layers_parameters, shape.expert_parameters // ranks
        layers = shape.layers_parameters - shape.expert_parameters + experts
        trainable, trained_experts = layers + ends, experts
        whole_ends = ends
        if self.config.training.method == "lora":
            whole = whole_modules(lora.modules_to_save, [each.module for each in shape.ends], tied=shape.tied)
            whole_ends = sum(each.elements for each in shape.ends if each.module in whole)
            modules, of_experts = self._adapted
            magnitudes = lora.dora * sum(each.count * each.shape[0] for each in modules)
            trained_experts = adapter_parameters(of_experts, lora.r) // ranks
            trainable = adapter_parameters(modules, lora.r) + trained_experts + magnitudes + whole_ends
        quantized = lora.quantization != "none"
        stage = PipelineStageSize(
            layers=shape.layers,
            layer_parameters=layers // shape.layers,
            end_parameters=ends,
            quantized=sum(each.elements for each in self._adapted[0] if each.in_layers) if quantized else 0,
            trainable=trainable,
            whole_ends=whole_ends,
            in_flight=1,
            last=True,
            experts=experts,
            trained_experts=trained_experts,
        )
        return (stage,)

    def activations(self, stage: PipelineStageSize, logits: float) -> float:
        """With the sums of experts and their updates, where they have adapters, and the gradient of a layer's.

        They are computed again in the backward pass; compiled ones that are not computed again are kept. Divided
        experts have the tokens of other ranks, and a copy for each expert, one layer at a time.
        """
        training, ranks = self.config.training, self.degrees.expert_parallel
        experts = self._adapted[1] if training.method == "lora" else []
        in_a_layer = sum(each.elements // each.count // ranks for each in experts)
        kept = training.activation_checkpointing == "none" and self._compiled and ranks == 1
        sums = stage.layers if kept else 1
        copies = self._sent + self.shape.experts_per_token if ranks > 1 else 0
        arrived = self.tokens * copies * self.shape.hidden * self.element
        return super().activations(stage, logits) + (sums + 1) * in_a_layer * self.element + arrived

    @property
    def _compiled(self) -> bool:
        """Whether layers are; but for experts, if they are divided."""
        return self.config.training.compiles(self.config.instance.has_accelerators)

    @property
    def _sent(self) -> float:
        """Ranks that have experts of a token, itself included, if a router chooses at random; 0 with whole experts."""
        ranks = self.degrees.expert_parallel
        return ranks * (1 - (1 - 1 / ranks) ** self.shape.experts_per_token) if ranks > 1 else 0.0

    @cached_property
    def _adapted(self) -> tuple[list[Parameters], list[Parameters]]:
        """Linear modules, and experts, that have adapters."""
        lora, shape = self.config.lora, self.shape
        by_default = shape.experts and lora.target_modules is None
        modules = shape.adapted(None if by_default else targets(lora, shape.model_type))
        return modules, shape.adapted_experts(lora.target_parameters)

    @property
    def _products(self) -> float:
        # where graphs end at divided experts, only what is between them is kept
        shape, others = self.shape, not (self._compiled and self.degrees.expert_parallel > 1)
        matrices = [each for each in shape.layer_inventory if each.is_matrices and (others or each.of_experts)]
        outputs = sum(self._in_a_layer(each) * each.outputs for each in matrices)
        # tokens go to their experts, and what these compute returns
        sent = 2 * self._sent * shape.hidden
        return self.element * (outputs + others * shape.query_width + sent) + others * self.kept.exchanged

    @property
    def _layer(self) -> float:
        shape, element = self.shape, self.element
        matrices = [each for each in shape.layer_inventory if each.is_matrices]
        inside = sum(self._in_a_layer(each) * self._kept_by(each) for each in matrices)
        total = _NORMS * shape.hidden * (self._norm + element) + element * inside + self._scores
        if shape.head_norms:
            total += self._norm * (shape.query_width + shape.key_width)
        return total + self._adapter_copies

    def _in_a_layer(self, parameters: Parameters) -> float:
        """How many of these matrices a token passes through in a layer, on average."""
        return self.shape.share(parameters) * parameters.widths / sum(parameters.shape[-2:]) / self.shape.layers

    def _kept_by(self, matrix: Parameters) -> int:
        """Elements per token that a layer keeps of what goes into a matrix and comes out."""
        hidden, (outputs, inputs) = self.shape.hidden, matrix.shape[-2:]
        if matrix.of_experts:
            return self._kept_by_expert(matrix, outputs + inputs - hidden)
        if hidden not in (outputs, inputs):
            # in latent attention: inputs are normalized before, and heads are put together from parts after
            return 2 * (outputs + inputs)
        leaves = outputs != hidden or matrix.module.rpartition(".")[2].startswith(_LEAVING)
        return outputs if leaves else 2 * inputs

    def _kept_by_expert(self, experts: Parameters, units: int) -> int:
        """`units`: the side that is not the model's width: with a fused gate, both of its parts."""
        trains = self.config.training.method == "full" or experts in self._adapted[1]
        if experts.name.endswith("down_proj"):
            return units * (1 + trains) + self.shape.hidden
        return units + self.shape.hidden * trains

    @property
    def _adapter_copies(self) -> float:
        """Bytes per token of what dropout keeps of the adapters' inputs, with a mask, and DoRA of outputs."""
        lora = self.config.lora
        if self.config.training.method != "lora":
            return 0.0
        each = (1 + self.element) * bool(lora.dropout)
        modules = [parameters for parameters in self._adapted[0] if parameters.in_layers]
        return sum(
            self._in_a_layer(one) * (each * one.inputs + lora.dora * self.element * one.outputs) for one in modules
        )
