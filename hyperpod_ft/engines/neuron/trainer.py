"""optimum-neuron's trainer with the run's model, adapters and optimizer, and fixes for its bugs on this path.

The bugs were seen in optimum-neuron 0.4.5 with neuronx-distributed 0.15; benchmarks/fidelity.md lists them.
"""

import math
from typing import Any

import torch
from neuronx_distributed.parallel_layers import parallel_state
from optimum.neuron import NeuronSFTConfig, NeuronSFTTrainer, NeuronTrainer
from optimum.neuron.models.training import NeuronModelForCausalLM
from optimum.neuron.models.training.transformations_utils import GQAQKVColumnParallelLinearSpec
from torch import nn

from hyperpod_ft import digests
from hyperpod_ft.checkpoint.formats.model_directory import read_config
from hyperpod_ft.data import tokenizer
from hyperpod_ft.engines.interface import TrainingTask
from hyperpod_ft.engines.neuron import arguments as neuron_arguments
from hyperpod_ft.engines.neuron import gradients
from hyperpod_ft.engines.peft_config import lora_config
from hyperpod_ft.planning.layout import copies_over_tensor

_heads_of_rank = GQAQKVColumnParallelLinearSpec.create_query_or_output_projection_local_weight_from_regular_weight


class Trainer(NeuronSFTTrainer):  # type: ignore[misc]
    """Prepares the model, runs forward and backward passes, and holds the optimizer; the engine has its own loop."""

    partial: list[nn.Parameter]  # parameters whose gradients must be summed over the tensor-parallel ranks
    trainable_here: int  # elements of this pipeline stage's trainable parameters, over all its ranks
    kv_size_multiplier: int  # how many tensor-parallel ranks hold each key and value head

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if not self.args.bf16:
            # otherwise ZeRO-1 keeps the weights in bf16 when training in fp32
            self.accelerator.mixed_precision_config.optimizer_use_master_weights = True

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        # NeuronSFTTrainer's version adds `use_cache`, which pipeline parallelism refuses; the model has it off anyway
        return NeuronTrainer.compute_loss(self, *arguments, **options)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters that this rank holds, by name."""
        named = getattr(self.model, "local_named_parameters", self.model.named_parameters)
        return {name: parameter for name, parameter in named() if parameter.requires_grad}


def build(task: TrainingTask, steps: int) -> Trainer:
    """Build the trainer, ready for its first step. Collective: joins the process group."""
    config = task.config
    # the same seed on every rank: parameters that are not split must be equal on all ranks
    torch.manual_seed(config.seed)
    gradients.sum_key_and_value_gradients_over_copies()
    settings = NeuronSFTConfig(**neuron_arguments.arguments(task, steps))
    model = NeuronModelForCausalLM.from_pretrained(
        task.base_model,
        settings.trn_config,
        torch_dtype=torch.bfloat16 if settings.bf16 else torch.float32,
        attn_implementation=neuron_arguments.attention(config),
    )
    trainer = Trainer(
        model=model,
        args=settings,
        processing_class=tokenizer.load(task.base_model),
        peft_config=lora_config(config, read_config(task.base_model)) if config.training.method == "lora" else None,
        # only its column names are used; the engine supplies the rows
        train_dataset=[{"input_ids": [0], "labels": [0]}],
    )
    heads = (model.config.num_attention_heads, model.config.num_key_value_heads)
    _draw_adapters(trainer.model, config.seed, heads)
    rows = settings.train_batch_size * settings.gradient_accumulation_steps
    trainer.setup_training(None, steps, 1, rows * steps, rows)
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    parameters, degree = trainer.parameters(), task.layout.degrees.tensor_parallel
    trainer.kv_size_multiplier = copies_over_tensor(heads[1], degree)
    replicas = {name: gradients.replicas(name, p, trainer.kv_size_multiplier) for name, p in parameters.items()}
    trainer.trainable_here = sum(p.numel() * degree // replicas[name] for name, p in parameters.items())
    gradients.count_each_element_once(trainer.optimizer, {id(p): replicas[name] for name, p in parameters.items()})
    sequence_parallel = settings.trn_config.sequence_parallel_enabled
    trainer.partial = gradients.partial(parameters, sequence_parallel=sequence_parallel) if degree > 1 else []
    gradients.disable_upstream_sum()
    return trainer


@torch.no_grad()
def _draw_adapters(model: nn.Module, seed: int, heads: tuple[int, int]) -> None:
    """Draw every lora_A as one whole matrix, of which each rank takes its part: the same at any tensor-parallel degree.

    `heads`: the numbers of attention heads and key/value heads. Upstream draws each rank's part separately, from
    generators in the same state, so that every rank gets the same block.
    Kaiming uniform with a = sqrt(5), as in PEFT (tuners/lora/layer.py, reset_lora_parameters): bound 1 / sqrt(columns).
    """
    for name, parameter in model.named_parameters():
        if ".lora_A." not in name:
            continue
        ranks, dimension = _split(parameter)
        shape = list(parameter.shape)
        shape[dimension] *= ranks
        generator = torch.Generator().manual_seed(int(digests.text_sha256(f"{seed} {name}")[:15], 16))
        bound = 1 / math.sqrt(shape[1])
        whole = torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
        repeated = copies_over_tensor(heads[1], ranks)
        if ".o_proj." in name and repeated > 1:
            # when key and value heads are repeated, upstream assigns the query heads in a different order
            local = _heads_of_rank(whole, *heads, repeated, "output")
        else:
            rank = parallel_state.get_tensor_model_parallel_rank() if ranks > 1 else 0
            local = whole.chunk(ranks, dimension)[rank]
        parameter.copy_(local)


def _split(parameter: Any) -> tuple[int, int]:
    """How many tensor-parallel ranks share the parameter, and along which dimension."""
    if gradients.is_replicated(parameter):
        return 1, 0
    return parallel_state.get_tensor_model_parallel_size(), parameter.partition_dim
