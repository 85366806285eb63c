"""The lightning attention layer: linear attention whose memory decays at a rate of each head's own.

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

from minimax_kernels import (
    BlockMemory,
    attention_matrix,
    current_state,
    extend,
    extend_packed,
    fold,
    lightning_attention,
    lightning_decode,
    padded_lightning_attention,
)
from minimax_kernels.backends import Backend, tracing, tracked, writable

from .cache import HybridCache, LightningCacheLayer
from .config import MiniMaxM1Config
from .layers import BiasFreeLinear, RMSNorm
from .sequences import SequenceMetadata

NORM_EPS = 1e-6  # whatever rms_norm_eps says: the release builds this norm without it


class LightningAttention(nn.Module):
    """Input and output (B, T, M); the norm runs over all H * D channels together.

    `backend` is the operator's: "auto", or one of its names to compare them.
    """

    backend: Backend = "auto"
    heads: slice = slice(None)  # which of the heads lie here; tensor parallelism sets it

    def __init__(self, config: MiniMaxM1Config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_layers = config.num_hidden_layers
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        width = self.num_heads * self.head_dim
        self.act = ACT2FN[config.hidden_act]
        self.qkv_proj = BiasFreeLinear(config.hidden_size, 3 * width)
        self.output_gate = BiasFreeLinear(config.hidden_size, width)
        self.out_proj = BiasFreeLinear(width, config.hidden_size)
        self.norm = RMSNorm(width, eps=NORM_EPS)

    def forward(self, x: Tensor, sequences: SequenceMetadata, cache: HybridCache | None) -> Tensor:
        q, k, v = self.project(x)
        if cache is None:
            out = self._attend(q, k, v, sequences)
        else:
            out = self._attend_with_cache(q, k, v, sequences, cache.layers[self.layer_idx])
        out = self.norm(out.flatten(2)) * self.output_gate(x).sigmoid()
        return self.out_proj(out)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, (B, T, H, D) each, of x (B, T, M)."""
        B, T, _ = x.shape
        qkv = self.act(self.qkv_proj(x)).view(B, T, -1, 3 * self.head_dim)
        q, k, v = qkv.split(self.head_dim, dim=-1)
        return q, k, v

    def log_decay(self, device: torch.device) -> Tensor:
        # a trace makes its own: what it would leave in the cache is no tensor with values
        constant = layer_log_decay.__wrapped__ if tracing() else layer_log_decay
        return constant(self.num_heads, self.layer_idx, self.num_layers, device=device)[self.heads]

    def attention_matrix(self, x: Tensor) -> Tensor:
        """The weights (B, H, T, T) of this layer's input x (B, T, M), unpadded: see the operator's."""
        q, k, _ = self.project(x)
        return attention_matrix(q, k, self.log_decay(x.device))

    def current_state(self, cache: HybridCache) -> Tensor | None:
        """The state (B, H, D, D) after the last cached position, None before the first."""
        memory = cache.layers[self.layer_idx].stored
        return None if memory is None else current_state(memory, self.log_decay(memory.state.device))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, sequences: SequenceMetadata) -> Tensor:
        log_decay = self.log_decay(q.device)
        if sequences.cu_seqlens is None:
            return padded_lightning_attention(
                q, k, v, log_decay, token_mask=sequences.token_mask, backend=self.backend
            )[0]
        out, _ = lightning_attention(
            q.flatten(0, 1)[None], k.flatten(0, 1)[None], v.flatten(0, 1)[None], log_decay,
            cu_seqlens=sequences.cu_seqlens, backend=self.backend,
        )  # fmt: skip
        return out.view(v.shape)

    def _attend_with_cache(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: SequenceMetadata, layer: LightningCacheLayer
    ) -> Tensor:
        T, log_decay = q.shape[1], self.log_decay(q.device)
        if sequences.cu_seqlens is not None:  # packed documents begin with an empty cache
            out, memory = extend_packed(
                q, k, v, log_decay, cu_seqlens=sequences.cu_seqlens, last_document=sequences.last_document,
                max_rollback=layer.max_rollback, backend=self.backend,
            )  # fmt: skip
            layer.put(memory, T)
            return out
        memory = layer.memory(k, v)
        can_decode = T == 1 and sequences.token_mask is None and layer.may_fold
        if layer.may_fold and not (can_decode and memory.is_one_block()):  # a decode step folds by itself
            memory = fold(memory, log_decay)
        if can_decode and not tracked(q, k, v, *memory):
            memory = _owned(memory)
            out = lightning_decode(q, k, v, log_decay, memory, backend=self.backend)
        else:
            out, memory = extend(
                q, k, v, log_decay, memory, token_mask=sequences.token_mask,
                max_rollback=layer.max_rollback, backend=self.backend,
            )  # fmt: skip
        layer.put(memory, T)
        return out


def _owned(memory: BlockMemory) -> BlockMemory:
    """A memory that a decode step may write into: part of no graph, and no inference tensor."""
    if any(x.requires_grad or not writable(x) for x in memory):
        return memory.map(lambda x: x.detach().clone())
    return memory


@cache  # a constant of the layer: made once for each device
@torch.inference_mode(False)  # made inside inference mode, it could not be used in training
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
