"""The size of a model as a list of its parameters, of which tensor parallelism and pipelines divide none."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from hyperpod_ft.checkpoint.adapters.lora_config import ends_with
from hyperpod_ft.planning.families import Family
from hyperpod_ft.planning.model_shape import ModelShape


@dataclass(frozen=True)
class Parameters:
    """Parameters that are alike. A `*` in `name` stands for the number of a layer, or of an expert."""

    name: str
    shape: tuple[int, ...]  # of one; a vector, a matrix, or the matrices of all experts of a layer, which come first
    count: int = 1
    of_experts: bool = False  # a token passes through some of them only: of those experts that its router chooses

    @property
    def elements(self) -> int:
        """Of all together."""
        return self.count * math.prod(self.shape)

    @property
    def in_layers(self) -> bool:
        """Whether they are in the layers, not at the model's ends."""
        return ".*." in self.name

    @property
    def is_matrices(self) -> bool:
        """Whether they are matrices; vectors and the filters of convolutions are not."""
        return len(self.shape) == (3 if self.of_experts else 2)

    @property
    def widths(self) -> int:
        """Inputs and outputs of all matrices together."""
        return self.count * math.prod(self.shape[:-2]) * sum(self.shape[-2:]) if self.is_matrices else 0

    @property
    def inputs(self) -> int:
        """Of one matrix, as most are stored: [outputs, inputs]."""
        return self.shape[-1]

    @property
    def outputs(self) -> int:
        """Of one matrix."""
        return self.shape[-2]

    @property
    def module(self) -> str:
        """The path of the module that they are the weight of."""
        return self.name.removesuffix(".weight")


@dataclass(frozen=True)
class UndividedShape(ModelShape):
    """A causal language model, by its parameters. What is unknown of attention is 0.

    Layers are counted as if all had the same size, the mean one.
    """

    inventory: tuple[Parameters, ...] = ()
    experts: int = 0  # of a layer; 0 without
    experts_used: int = 0  # by a token; 0: unknown
    complete: bool = True  # layers are attention and MLP: what they keep is known
    one_a_row: bool = False  # it is known that its examples do not share rows (stage certify finds it for others)

    @property
    def family(self) -> Family:
        """The family, which is not in the table of families."""
        return Family((self.model_type,), columns={}, rows=())

    @property
    def head_norms(self) -> bool:
        return any(parameters.name.endswith("q_norm.weight") for parameters in self.inventory)

    @property
    def experts_per_token(self) -> int:
        """Experts of a layer that a token passes through; all if unknown."""
        return self.experts_used or self.experts

    @property
    def used_share(self) -> float:
        """Share of the experts that a token passes through."""
        return self.experts_per_token / self.experts if self.experts else 1.0

    @property
    def layer_inventory(self) -> tuple[Parameters, ...]:
        """What is in the layers."""
        return tuple(parameters for parameters in self.inventory if parameters.in_layers)

    @property
    def ends(self) -> tuple[Parameters, ...]:
        """Embedding and output layer; types that are sized by their files may have other matrices beside the layers."""
        return tuple(each for each in self.inventory if each.is_matrices and not each.in_layers)

    @property
    def parameters(self) -> int:
        return sum(parameters.elements for parameters in self.inventory)

    @property
    def layers_parameters(self) -> int:
        """Parameters of all layers together."""
        return sum(parameters.elements for parameters in self.layer_inventory)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts."""
        return sum(parameters.elements for parameters in self.inventory if parameters.of_experts)

    @property
    def active_parameters(self) -> int:
        """Parameters that a token passes through, with the embedding."""
        return self.parameters - round(self.expert_parameters * (1 - self.used_share))

    @property
    def layer_multiplied(self) -> int:
        """Elements of the matrices of a layer, of those that a token passes through."""
        total = sum(self.share(each) * each.elements for each in self.layer_inventory if each.is_matrices)
        return round(total / self.layers)

    def largest_parameter(self, tensor_parallel: int, expert_parallel: int) -> int:
        """The experts of a layer, or the embedding."""
        return max(
            math.prod(parameters.shape) // (expert_parallel if parameters.of_experts else 1)
            for parameters in self.inventory
        )

    def share(self, parameters: Parameters) -> float:
        """The share of these parameters that a token passes through."""
        return self.used_share if parameters.of_experts else 1.0

    def adapted(self, targets: Collection[str] | None) -> list[Parameters]:
        """The linear modules that have adapters, by the ends of their names.

        None: those that a mixture gets by default, all of the layers but routers and gates.
        """
        linears = [each for each in self.inventory if each.is_matrices and not each.of_experts]
        if targets is None:
            return [each for each in linears if each.in_layers and each.outputs not in (1, self.experts)]
        return [each for each in linears if _named(each.module, targets)]

    def adapted_experts(self, targets: Collection[str]) -> list[Parameters]:
        """The parameters of all experts of a layer that have adapters, by the ends of their names."""
        return [each for each in self.inventory if each.of_experts and _named(each.name, targets)]


def adapter_parameters(parameters: Iterable[Parameters], rank: int) -> int:
    """Elements of both factors of each matrix."""
    return rank * sum(each.widths for each in parameters)


def _named(path: str, targets: Collection[str]) -> bool:
    return any(ends_with(path, target) for target in targets)
