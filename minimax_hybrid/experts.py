"""The mixture of experts that follows every attention layer.

    p = softmax(x W_gate)   in float32, over all E experts
    y = sum over the A largest of  p_e / (their sum) * w2_e (silu(w1_e x) * w3_e x)

(M1 report, section 2.1; released modeling file, lines 905-957.)
"""

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from minimax_kernels import grouped_linear
from minimax_kernels.backends import without_autocast

from .config import MiniMaxM1Config
from .layers import Linear


class Router(nn.Module):
    """Which experts a token goes to; float32 throughout, whatever the model's type."""

    def __init__(self, config: MiniMaxM1Config):
        super().__init__()
        self.experts_per_token = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(config.num_local_experts, config.hidden_size))

    def forward(self, x_NM: Tensor, chosen: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (N, E), weights (N, A) and experts (N, A); `chosen` (N, A) replays an earlier choice."""
        with without_autocast(x_NM):
            wide = torch.promote_types(x_NM.dtype, torch.float32)
            logits = nn.functional.linear(x_NM.to(wide), self.weight.to(wide))
            probabilities = logits.softmax(dim=-1)
            if chosen is None:
                weights, chosen = probabilities.topk(self.experts_per_token, dim=-1)
            else:
                weights = probabilities.gather(-1, chosen)
            return logits, weights / weights.sum(dim=-1, keepdim=True), chosen


class Experts(nn.Module):
    """All experts' weights, stacked: `gate_up_proj` (E, 2F, M) is w1 over w3, `down_proj` (E, M, F) is w2."""

    def __init__(self, config: MiniMaxM1Config):
        super().__init__()
        E, M, F = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.act = ACT2FN[config.hidden_act]
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * F, M))
        self.down_proj = nn.Parameter(torch.empty(E, M, F))

    def forward(self, x_NM: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        A = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)  # (R,), R = N * A for N tokens
        tokens_per_expert = chosen.flatten().bincount(minlength=self.down_proj.shape[0])
        routed_RM = x_NM[order // A]
        gate, up = grouped_linear(routed_RM, self.gate_up_proj, tokens_per_expert).chunk(2, dim=-1)
        out_RM = grouped_linear(self.act(gate) * up, self.down_proj, tokens_per_expert)
        out_RM = out_RM * weights.to(out_RM.dtype).flatten()[order, None]
        return torch.zeros_like(x_NM, dtype=out_RM.dtype).index_add(0, order // A, out_RM)


class SharedExpert(nn.Module):
    """The expert that every token visits, of width `intermediate_size`."""

    def __init__(self, config: MiniMaxM1Config):
        super().__init__()
        self.act = ACT2FN[config.hidden_act]
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class MixtureOfExperts(nn.Module):
    """Router and experts; the attribute names are the published checkpoints'."""

    def __init__(self, config: MiniMaxM1Config):
        super().__init__()
        self.jitter = config.router_jitter_noise
        self.gate = Router(config)
        self.experts = Experts(config)

    def forward(self, x: Tensor, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Output (B, T, M) and the router's logits (B * T, E)."""
        x_NM = x.reshape(-1, x.shape[-1])
        if self.training and self.jitter > 0:
            x_NM = x_NM * torch.empty_like(x_NM).uniform_(1 - self.jitter, 1 + self.jitter)
        logits, weights, chosen = self.gate(x_NM, chosen)
        return self.experts(x_NM, weights, chosen).view(x.shape), logits


def mix_shared(routed: Tensor, shared: Tensor, x: Tensor, coefficient: Tensor) -> Tensor:
    """routed * (1 - c) + shared * c with c = sigmoid(x . coefficient), in float32; coefficient is (1, M)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    c = nn.functional.linear(x.to(wide), coefficient.to(wide)).sigmoid()
    return (routed.to(wide) * (1 - c) + shared.to(wide) * c).to(x.dtype)


def load_balancing_loss(
    router_logits: tuple[Tensor, ...], experts_per_token: int, real: Tensor | None = None
) -> Tensor:
    """E * sum over experts of (share of choices) * (mean probability).

    It is A if either is even, and more where both lean to the same experts.

    transformers' definition (Switch Transformer, equations 4-6), over all layers together, no coefficient.

    Args:
        router_logits: (N, E) of each layer.
        experts_per_token: A.
        real: (B, T) or (N,), zero at padding, which counts for nothing.

    Returns:
        a float32 scalar; 0 with a graph where nothing is real.
    """
    if not router_logits:
        raise ValueError("the load-balancing loss needs router logits of at least one layer, got none")
    logits = torch.stack(
        [x.to(torch.promote_types(x.dtype, torch.float32)) for x in router_logits]
    )  # (L, N, E)
    L, N, E = logits.shape
    counts = logits.new_ones(N) if real is None else real.reshape(-1).to(logits)
    if len(counts) != N:
        raise ValueError(f"the mask has {len(counts)} positions and the router logits {N}; give one for each")
    probabilities = logits.softmax(dim=-1)
    chosen = torch.zeros_like(probabilities).scatter_(
        -1, probabilities.topk(experts_per_token, dim=-1)[1], 1.0
    )
    total = (counts.sum() * L).clamp(min=1)
    hidden = counts[None, :, None] == 0
    share = (chosen * counts[:, None]).sum(dim=(0, 1)) / total
    mean = probabilities.masked_fill(hidden, 0).sum(dim=(0, 1)) / total
    return E * (share * mean).sum()
