"""GPT-J's attention within documents, which transformers does not call through AttentionInterface."""

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gptj import modeling_gptj

from hyperpod_ft.engines.torch.model import attention


class DocumentAttention(modeling_gptj.GPTJAttention):
    """Transformers' class, but AttentionInterface has queries, keys and values [rows, heads, length, size]."""

    def _attn(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        dropout = self.attn_dropout.p if self.training else 0.0
        attend = ALL_ATTENTION_FUNCTIONS[attention.NAME]  # ranks that share rows register their own
        attended, _ = attend(self, query, key, value, attention_mask, dropout=dropout)
        return attended.transpose(1, 2), None


modeling_gptj.GPTJ_ATTENTION_CLASSES[attention.NAME] = DocumentAttention
