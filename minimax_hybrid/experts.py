"""The mixture of experts that follows every attention layer.

    p = softmax(x W_gate)   in float32, over all E experts
    y = sum over the A largest of  p_e / (their sum) * w2_e (silu(w1_e x) * w3_e x)

(M1 report, section 2.1; released modeling file, lines 905-957.)
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from minimax_kernels import grouped_linear
from minimax_kernels.backends import accumulation_dtype, full_float32

from .config import MiniMaxM1Config
from .layers import BiasFreeLinear


class Router(nn.Module):
    """Which experts a token goes to; float32 throughout, whatever the model's type.

    The weight is made in float32 and stays there through `.to(torch.bfloat16)` and the like, as the release
    stores it: a choice among experts that flips with a rounding is another function.
    """

    def __init__(self, config: MiniMaxM1Config):
        super().__init__()
        self.experts_per_token = config.num_experts_per_tok
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.weight = nn.Parameter(torch.empty(config.num_local_experts, config.hidden_size, dtype=dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        def at_least_float32(x: Tensor) -> Tensor:
            moved = fn(x)
            narrow = moved.is_floating_point() and moved.dtype != accumulation_dtype(moved)
            return x.to(moved.device, accumulation_dtype(moved)) if narrow else moved

        return super()._apply(at_least_float32, recurse)

    def forward(self, x_NM: Tensor, topk_expert_ids: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (N, E), scores (N, A) and expert ids (N, A) of tokens (N, M); given ids are replayed."""
        with full_float32(x_NM):
            dtype = accumulation_dtype(x_NM)
            logits = nn.functional.linear(x_NM.to(dtype), self.weight.to(dtype))
            probabilities = logits.softmax(dim=-1)
            if topk_expert_ids is None:
                scores, topk_expert_ids = probabilities.topk(self.experts_per_token, dim=-1)
            else:
                scores = probabilities.gather(-1, topk_expert_ids)
            return logits, scores / scores.sum(dim=-1, keepdim=True), topk_expert_ids


class Experts(nn.Module):
    """All experts' weights, stacked: `gate_up_proj` (E, 2F, M) is w1 over w3, `down_proj` (E, M, F) is w2."""

    def __init__(self, config: MiniMaxM1Config):
        super().__init__()
        E, M, F = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.num_experts = E
        self.act = ACT2FN[config.hidden_act]
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * F, M))
        self.down_proj = nn.Parameter(torch.empty(E, M, F))

    def forward(self, x_NM: Tensor, topk_expert_ids: Tensor, topk_scores: Tensor) -> Tensor:
        """Outputs (N, M) of tokens (N, M), each through its A experts, by ids and scores (N, A).

        The id E stands for an expert that lies elsewhere and adds nothing here.
        """
        A = topk_expert_ids.shape[1]
        expert_of_R = topk_expert_ids.flatten()  # R = N * A routed copies of the tokens
        order = expert_of_R.argsort(stable=True)
        E = self.down_proj.shape[0]
        # not bincount, which waits for a GPU and stops a trace
        tokens_per_expert = expert_of_R.new_zeros(E + 1)
        tokens_per_expert = tokens_per_expert.scatter_add_(0, expert_of_R, torch.ones_like(expert_of_R))[:E]
        routed_RM = x_NM[order // A]
        gate, up = grouped_linear(routed_RM, self.gate_up_proj, tokens_per_expert).chunk(2, dim=-1)
        out_RM = grouped_linear(self.act(gate) * up, self.down_proj, tokens_per_expert)
        out_RM = out_RM * topk_scores.to(out_RM.dtype).flatten()[order, None]
        return torch.zeros_like(x_NM, dtype=out_RM.dtype).index_add(0, order // A, out_RM)


class SharedExpert(nn.Module):
    """The expert that every token visits, of width `intermediate_size`."""

    def __init__(self, config: MiniMaxM1Config):
        super().__init__()
        self.act = ACT2FN[config.hidden_act]
        self.gate_proj = BiasFreeLinear(config.hidden_size, config.intermediate_size)
        self.up_proj = BiasFreeLinear(config.hidden_size, config.intermediate_size)
        self.down_proj = BiasFreeLinear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class MixtureOfExperts(nn.Module):
    """Router and experts; the attribute names are the published checkpoints'."""

    def __init__(self, config: MiniMaxM1Config):
        super().__init__()
        self.jitter = config.router_jitter_noise
        self.gate = Router(config)
        self.experts = Experts(config)

    def forward(self, x: Tensor, topk_expert_ids: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Output (B, T, M), the router's logits (N, E) and the experts used (N, A), N = B * T."""
        x_NM = x.reshape(-1, x.shape[-1])
        if self.training and self.jitter > 0:
            x_NM = x_NM * torch.empty_like(x_NM).uniform_(1 - self.jitter, 1 + self.jitter)
        logits, topk_scores, topk_expert_ids = self.gate(x_NM, topk_expert_ids)
        return self.experts(x_NM, topk_expert_ids, topk_scores).view(x.shape), logits, topk_expert_ids


def mix_shared(routed: Tensor, shared: Tensor, x: Tensor, coefficient: Tensor) -> Tensor:
    """routed * (1 - c) + shared * c with c = sigmoid(x . coefficient), in float32; coefficient is (1, M)."""
    dtype = accumulation_dtype(x)
    c = nn.functional.linear(x.to(dtype), coefficient.to(dtype)).sigmoid()
    return (routed.to(dtype) * (1 - c) + shared.to(dtype) * c).to(x.dtype)


def load_balancing_loss(
    router_logits: Sequence[Tensor],
    topk_expert_ids: Sequence[Tensor],
    token_mask: Tensor | None = None,
) -> Tensor:
    """E * sum over experts of (share of choices) * (mean probability).

    It is A if either is even, and more where both lean to the same experts.

    transformers' definition (Switch Transformer, equations 4-6), over all layers together, no coefficient.

    Args:
        router_logits, topk_expert_ids: (N, E) and (N, A) of each layer.
        token_mask: (B, T) or (N,), zero at padding, which counts for nothing.

    Returns:
        a float32 scalar; 0 with a graph where there are no tokens.
    """
    if not router_logits:
        raise ValueError("the load-balancing loss needs router logits of at least one layer, got none")
    device = router_logits[0].device  # layers may lie on several
    logits = torch.stack([x.to(device, accumulation_dtype(x)) for x in router_logits])  # (L, N, E)
    L, N, E = logits.shape
    counts = logits.new_ones(N) if token_mask is None else token_mask.reshape(-1).to(logits)
    if len(counts) != N:
        raise ValueError(f"the mask has {len(counts)} positions and the router logits {N}; give one for each")
    probabilities = logits.softmax(dim=-1)
    ids = torch.stack([x.to(device) for x in topk_expert_ids])  # (L, N, A)
    chosen = torch.zeros_like(probabilities).scatter_(-1, ids, 1.0)
    total = (counts.sum() * L).clamp(min=1)
    padding = counts[None, :, None] == 0
    share = (chosen * counts[:, None]).sum(dim=(0, 1)) / total
    mean = probabilities.masked_fill(padding, 0).sum(dim=(0, 1)) / total
    return E * (share * mean).sum()
