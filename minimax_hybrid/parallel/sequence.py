"""Lightning attention over a sequence whose pieces lie on different ranks.

A piece enters the later ones only through its state, and decays from there on with their lengths:

    own[r]     = the state after piece r, started from zeros                      (B, H, Dk, Dv)
    initial[r] = sum over s < r of  exp(log_decay * lengths between s and r) * own[s]
    out[r]     = lightning_attention(piece r, initial_state=initial[r])

So one all-gather of a state and a total decay a head and rank: H * (B * Dk * Dv + 1) float32 numbers from
each, whatever the length. (LASP-2; MiniMax-01 report, section 3.3.)
"""

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from minimax_kernels import lightning_attention
from minimax_kernels.backends import Backend


def lightning_attention_over_ranks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """`lightning_attention` of one sequence, cut over the ranks of a group in their order.

    Differentiable; forward and backward each run on all ranks of the group together. The operator runs twice,
    first for the piece's own state.

    Args:
        q, k, v: (B, T, H, D) of this rank's piece; T may differ between ranks.
        log_decay: (H,), the same on all ranks.

    Returns:
        out (B, T, H, Dv) of this rank's piece, and the state (B, H, Dk, Dv) after it and all before.
    """
    if group is None:
        group = dist.group.WORLD
    _, own = lightning_attention(q, k, v, log_decay, backend=backend)
    weights = _weights(log_decay.to(own.dtype) * q.shape[1], group)  # (ranks, H)
    states = _AllGather.apply(own, group)  # (ranks, B, H, Dk, Dv)
    # later pieces have the weight 0 and stay in the graph: all ranks meet in the backward pass
    initial = torch.einsum("sh,sbhkv->bhkv", weights, states)
    return lightning_attention(q, k, v, log_decay, initial_state=initial, backend=backend)


class _AllGather(torch.autograd.Function):
    """Each rank's tensor, stacked; the gradient of one is the sum over the ranks that used it."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, x = group, x.contiguous()
        gathered = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, x, group=group)
        return torch.stack(gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx, dgathered: Tensor) -> tuple[Tensor, None]:
        dgathered = dgathered.contiguous()
        dist.all_reduce(dgathered, group=ctx.group)
        return dgathered[dist.get_rank(ctx.group)], None


def _weights(total: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """How much of each rank's own state is left where this rank begins, from total decays (H,) of pieces."""
    gathered = [torch.empty_like(total) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, total.contiguous(), group=group)
    rank = dist.get_rank(group)
    totals = torch.stack(gathered)
    weights = torch.zeros_like(totals)
    for s in range(rank):
        weights[s] = totals[s + 1 : rank].sum(0).exp()
    return weights
