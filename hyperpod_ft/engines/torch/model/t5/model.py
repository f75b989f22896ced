"""T5 and Flan-T5 (v1.0 and the gated v1.1) as a model that returns its loss, and divided over tensor-parallel ranks.

What differs from causal models: two stacks, attention with a bias (attention.py), and an output layer that v1.0
shares with the embedding, with hidden states scaled by 1 / sqrt(d_model) (Raffel et al., arXiv:1910.10683; Mesh
TensorFlow, transformer.py), and v1.1 does not.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from hyperpod_ft.engines.batches import Seq2SeqBatch
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.model import language_model, vocabulary_parallel
from hyperpod_ft.engines.torch.model.loss import LogitsRule
from hyperpod_ft.engines.torch.model.t5 import attention
from hyperpod_ft.engines.torch.model.tensor_parallel import Splitting, enter_block
from hyperpod_ft.engines.torch.sharding.shards import TensorSplit
from hyperpod_ft.engines.torch.tensor_collectives import copy_to_ranks, divide_dropout, sum_over_ranks
from hyperpod_ft.planning.families import Family


def inputs(batch: Seq2SeqBatch, device: torch.device, compiled: bool = False) -> dict[str, torch.Tensor]:
    """The arguments of the model's forward pass, on `device`, from a batch on the CPU. `compiled`: its layers are.

    input_ids, documents [rows, max_length]; decoder_input_ids, decoder_documents [rows, max_target_length]; targets
    int64 [positions], the tokens to predict; predicted_at int64 [positions], where in the decoder's rows laid end to
    end, unless it is everywhere; bounds as in attention.py, for attention document by document.
    """
    tensors = {name: tensor for name, tensor in vars(batch).items() if name != "labels"}
    tensors |= language_model.predicted(batch.labels.flatten(), device)
    if device.type == "cpu" and not compiled:
        tensors["bounds"] = attention.document_bounds(batch.documents, batch.decoder_documents)
    return {name: devices.copied_to(device, tensor) for name, tensor in tensors.items()}


def return_loss(model: PreTrainedModel, *, fused: bool = False) -> None:
    """Make the model's forward pass take `inputs` and return the cross entropy summed over its targets, fp32 [].

    `fused`: see LogitsRule. Raises UserError when its logits are not those of a head whose input is scaled as said
    above.
    """
    config = model.config
    rule = LogitsRule(config.d_model**-0.5 if config.scale_decoder_outputs else 1.0, fused=fused)
    language_model.check_logits(model, rule, stacks=("encoder", "decoder"))
    attention.replace(model)
    model.forward = _LossForward(model, rule)


class _LossForward(language_model.LossForward):
    def __call__(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        documents: torch.Tensor,
        decoder_input_ids: torch.Tensor,
        decoder_documents: torch.Tensor,
        targets: torch.Tensor,
        predicted_at: torch.Tensor | None = None,
        bounds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        model: Any = self._model
        masks = attention.masks(documents, decoder_documents) if bounds is None else attention.by_bounds(bounds)
        encoded = model.encoder(input_ids=input_ids, attention_mask=masks.encoder)[0]
        decoded = model.decoder(
            input_ids=decoder_input_ids,
            attention_mask=masks.decoder,
            encoder_hidden_states=encoded,
            encoder_attention_mask=masks.cross,
            use_cache=False,
        )[0]
        return self.loss(decoded, targets, predicted_at)


_ATTENTION = Family(("t5",), columns=dict.fromkeys("qkv", ("queries",)), rows=("o",))


def parallelize(model: PreTrainedModel, mesh: DeviceMesh) -> dict[str, TensorSplit]:
    """Split a T5 over the 1-D `mesh`, in place; returns what became of parameters, by FQN.

    As that of other families (model/tensor_parallel.py), without sequence parallelism. Each rank has some heads of all
    attentions, with their columns of the relative position bias, and some units of the MLPs. Cross-attention reads the
    encoder's output too, whose gradients add up over the ranks as those of its own input.
    """
    splits: dict[nn.Parameter, TensorSplit] = {}
    for module in model.modules():
        if hasattr(module, "SelfAttention") or hasattr(module, "EncDecAttention"):
            attention: Any = getattr(module, "EncDecAttention", None) or module.SelfAttention
            splitting = _split(attention, Splitting(model.config, _ATTENTION, mesh))
            if attention.has_relative_attention_bias:
                splitting.divide(attention.relative_attention_bias, ("queries",), {"weight": 1})
            splits |= splitting.splits
        elif hasattr(module, "DenseReluDense"):
            mlp: Any = module.DenseReluDense
            inputs = [name for name in ("wi", "wi_0", "wi_1") if hasattr(mlp, name)]
            family = Family(("t5",), columns=dict.fromkeys(inputs, ("units",)), rows=("wo",))
            splits |= _split(mlp, Splitting(model.config, family, mesh)).splits
            divide_dropout(mlp.dropout, mesh.get_group(), dim=-1)
    embeddings = [model.get_submodule(name) for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")]
    splits |= vocabulary_parallel.divide(
        embeddings, model.get_output_embeddings(), model.config.vocab_size, mesh.get_group()
    )
    return {name: splits[parameter] for name, parameter in model.named_parameters() if parameter in splits}


def _split(block: nn.Module, splitting: Splitting) -> Splitting:
    block.register_forward_pre_hook(enter_block(copy_to_ranks, splitting.group), with_kwargs=True)
    splitting.linears(block, sum_over_ranks)
    return splitting
