"""One layer: attention of its kind, then the experts, each with a norm before it and a weighted residual.

h = norm1(x);  x = alpha * (h or x) + beta * attention(h)        lightning or softmax
h = norm2(x);  x = alpha * (h or x) + beta * experts(h)
"""

from typing import NamedTuple

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .cache import HybridCache
from .config import LIGHTNING, MiniMaxM1Config
from .experts import MixtureOfExperts, SharedExpert, mix_shared
from .layers import RMSNorm, weighted_residual
from .lightning_attention import LightningAttention
from .sequences import SequenceMetadata
from .softmax_attention import SoftmaxAttention


class LayerOutput(NamedTuple):
    """What a layer gives: (B, T, M), (N, E), (N, A) with N = B * T, and (B, H, T, past + T) or None."""

    hidden: Tensor
    router_logits: Tensor
    topk_expert_ids: Tensor
    attentions: Tensor | None


class DecoderLayer(GradientCheckpointingLayer):
    """Attention of the layer's kind, then the experts, each with a norm before it and a weighted residual."""

    def __init__(self, config: MiniMaxM1Config, layer_idx: int):
        super().__init__()
        self.is_lightning = config.attn_type_list[layer_idx] == LIGHTNING
        self.postnorm = config.postnorm
        attention = LightningAttention if self.is_lightning else SoftmaxAttention
        kind = "linear" if self.is_lightning else "full"
        self.attention_factors = {
            name: getattr(config, f"layernorm_{kind}_attention_{name}") for name in ("alpha", "beta")
        }
        self.mlp_factors = {name: getattr(config, f"layernorm_mlp_{name}") for name in ("alpha", "beta")}
        self.self_attn = attention(config, layer_idx)
        self.block_sparse_moe = MixtureOfExperts(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.shared_intermediate_size > 0:
            self.shared_mlp = SharedExpert(config)
            self.coefficient = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(
        self,
        x: Tensor,
        sequences: SequenceMetadata,
        *,
        rotary: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        topk_expert_ids: Tensor | None = None,
        cache: HybridCache | None = None,
    ) -> LayerOutput:
        """x (B, T, M) through the layer; given expert ids (N, A) replace the router's choice."""
        sequences = sequences.to(x.device)
        h = self.input_layernorm(x)
        attentions = None
        if self.is_lightning:
            branch = self.self_attn(h, sequences, cache)
        else:
            branch, attentions = self.self_attn(
                h, sequences, cache, rotary=rotary, attention_mask=attention_mask
            )
        x = weighted_residual(h if self.postnorm else x, branch, **self.attention_factors)
        h = self.post_attention_layernorm(x)
        branch, router_logits, topk_expert_ids = self.block_sparse_moe(h, topk_expert_ids)
        if hasattr(self, "shared_mlp"):
            branch = mix_shared(branch, self.shared_mlp(h), h, self.coefficient.weight)
        x = weighted_residual(h if self.postnorm else x, branch, **self.mlp_factors)
        return LayerOutput(x, router_logits, topk_expert_ids, attentions)
