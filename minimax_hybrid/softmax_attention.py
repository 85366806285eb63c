"""The softmax attention layer: grouped-query, causal, rotary on the leading dimensions of a head.

The attention itself is transformers' (`sdpa`, `eager`, `flash_attention_2`, `flex_attention`), as
`config._attn_implementation` says; one query is computed here.
"""

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.minimax.modeling_minimax import eager_attention_forward

from .cache import HybridCache
from .config import MiniMaxM1Config
from .layers import BiasFreeLinear, apply_rotary_emb
from .sequences import SequenceMetadata


class SoftmaxAttention(nn.Module):
    """Input (B, T, M); output (B, T, M) and, with `eager`, the weights (B, H, T, past + T)."""

    is_causal = True

    def __init__(self, config: MiniMaxM1Config, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        M, D = config.hidden_size, config.head_dim
        self.q_proj = BiasFreeLinear(M, config.num_attention_heads * D)
        self.k_proj = BiasFreeLinear(M, config.num_key_value_heads * D)
        self.v_proj = BiasFreeLinear(M, config.num_key_value_heads * D)
        self.o_proj = BiasFreeLinear(config.num_attention_heads * D, M)

    def forward(
        self,
        x: Tensor,
        sequences: SequenceMetadata,
        cache: HybridCache | None,
        *,
        rotary: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        T = x.shape[1]
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )  # (B, H, T, D)
        q, k = apply_rotary_emb(q, *rotary), apply_rotary_emb(k, *rotary)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        if T == 1 and self.config._attn_implementation == "sdpa" and not self.training:
            return self.o_proj(self._attend_one(q, k, v, attention_mask)), None
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        out, weights = attention(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            # flash attention finds packed documents by them; the others have a mask
            position_ids=sequences.position_ids if sequences.cu_seqlens is not None else None,
        )
        return self.o_proj(out.flatten(2)), weights

    def _attend_one(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        """One query a sequence, (B, 1, H * D): heads that share keys become the queries of one small product.

        Reads each key once. Left to PyTorch's own grouping, bfloat16 took 12 times as long at 1,024 keys
        (685 us against 57, one thread of an AMD EPYC, torch 2.13).
        """
        B, H, _, D = q.shape
        q = q.view(B, k.shape[1], -1, D)  # (B, Hkv, H / Hkv, D)
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_mask, scale=self.scaling
        )
        return out.reshape(B, 1, H * D)
