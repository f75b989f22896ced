"""GPT-J's attention within documents, which transformers does not call through AttentionInterface."""

import torch
from transformers.models.gptj import modeling_gptj

from hyperpod_ft.engines.torch.model import attention


class DocumentAttention(modeling_gptj.GPTJAttention):
    """Transformers' class, but queries, keys and values [rows, heads, length, size] go to `attention.attend`."""

    def _attn(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        dropout = self.attn_dropout.p if self.training else 0.0
        attended, _ = attention.attend(self, query, key, value, attention_mask, dropout=dropout)
        return attended.transpose(1, 2), None


modeling_gptj.GPTJ_ATTENTION_CLASSES[attention.NAME] = DocumentAttention
