"""The lightning attention layer: linear attention whose memory fades at a speed of each head's own.

    q, k, v = split(silu(x W_qkv))      per head: (B, T, H, 3 D), then three parts
    out     = lightning_attention(q, k, v, log_decay)
    y       = (RMSNorm(out) * sigmoid(x W_gate)) W_out

No rotary embedding, no 1/sqrt(D), no softmax.
(MiniMax-01 report, section 2.2; released modeling file, lines 247-343.)
"""

import math
from functools import cache

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from minimax_kernels import lightning_attention

from .cache import HybridCache
from .config import MiniMaxM1Config
from .layers import Linear, RMSNorm
from .sequences import Sequences, padded_lightning_attention

NORM_EPS = 1e-6  # whatever rms_norm_eps says: the release builds this norm without it


class LightningAttention(nn.Module):
    """Input and output (B, T, M); the norm runs over all H * D channels together."""

    def __init__(self, config: MiniMaxM1Config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_layers = config.num_hidden_layers
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        width = self.num_heads * self.head_dim
        self.act = ACT2FN[config.hidden_act]
        self.qkv_proj = Linear(config.hidden_size, 3 * width)
        self.output_gate = Linear(config.hidden_size, width)
        self.out_proj = Linear(width, config.hidden_size)
        self.norm = RMSNorm(width, eps=NORM_EPS)

    def forward(self, x: Tensor, sequences: Sequences, cache: HybridCache | None) -> Tensor:
        B, T, _ = x.shape
        qkv = self.act(self.qkv_proj(x)).view(B, T, self.num_heads, 3 * self.head_dim)
        q, k, v = qkv.split(self.head_dim, dim=-1)  # (B, T, H, D)
        log_decay = layer_log_decay(self.num_heads, self.layer_idx, self.num_layers, device=x.device)
        out = self._attend(q, k, v, log_decay, sequences, cache)
        out = self.norm(out.flatten(2)) * self.output_gate(x).sigmoid()
        return self.out_proj(out)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        sequences: Sequences,
        cache: HybridCache | None,
    ) -> Tensor:
        memory = None if cache is None else cache.layers[self.layer_idx]
        if sequences.cu_seqlens is None:
            if memory is not None:
                return memory.attend(q, k, v, log_decay, real=sequences.real)
            return padded_lightning_attention(q, k, v, log_decay, mask=sequences.real)[0]
        rows = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
        out, _ = lightning_attention(*rows, log_decay, cu_seqlens=sequences.cu_seqlens)
        if memory is not None:
            memory.attend(q, k, v, log_decay, real=sequences.last_document)
        return out.view(v.shape)


@cache  # a constant of the layer: made once for each device
@torch.inference_mode(False)
def layer_log_decay(num_heads: int, layer_idx: int, num_layers: int, *, device: torch.device) -> Tensor:
    """log_decay (H,) float32 of one layer: minus ALiBi's slopes times (1 - i / (L - 1) + 1e-5).

    Early layers forget within a few tokens, the last one hardly at all. `i` counts softmax layers too.
    """
    slopes = torch.tensor(_alibi_slopes(num_heads), dtype=torch.float32, device=device)
    return -slopes * (1 - layer_idx / max(num_layers - 1, 1) + 1e-5)


def _alibi_slopes(heads: int) -> list[float]:
    """2^(-8 (h+1) / H) for a power of two; else the power below's, then every second of the power above's."""
    if math.log2(heads).is_integer():
        return [2 ** (-8 * (h + 1) / heads) for h in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return _alibi_slopes(below) + _alibi_slopes(2 * below)[0::2][: heads - below]
