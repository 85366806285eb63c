"""Lightning attention token by token: the definition that every other backend must meet.

state[t] = exp(log_decay) * state[t-1] + outer(k[t], v[t])
out[t]   = q[t] @ state[t]
"""

import torch
from torch import Tensor

from .memory import BLOCK, BlockMemory


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `interface.lightning_attention`, from a state (S, H, Dk, Dv) in the accumulation type."""
    if cu_seqlens is None:
        return _run(q, k, v, log_decay, state)
    bounds = cu_seqlens.tolist()
    outs, states = [], []
    for s, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        out, last = _run(q[:, start:end], k[:, start:end], v[:, start:end], log_decay, state[s : s + 1])
        outs.append(out)
        states.append(last)
    outs.append(torch.zeros_like(v[:, bounds[-1] :]))
    return torch.cat(outs, dim=1), torch.cat(states) if states else state


def attention_matrix(q: Tensor, k: Tensor, log_decay: Tensor) -> Tensor:
    """The weights (B, H, T, T) that `lightning_attention` gives to each earlier token, out = weights @ v.

        weights[i, j] = exp(log_decay * (i - j)) * (q[i] . k[j])        for j <= i, else 0

    Quadratic in T, and not normalised: for looking at a layer, not for computing it.

    Args:
        q, k: (B, T, H, Dk), already activated, of one sequence each.
        log_decay: (H,) float, at most 0.
    """
    T = q.shape[1]
    position = torch.arange(T, device=q.device)
    distance = position[:, None] - position
    decay = (log_decay[:, None, None] * distance.clamp(min=0)).exp()  # (H, T, T)
    q, k = (x.transpose(1, 2).to(decay.dtype) for x in (q, k))
    return (q @ k.mT * decay).masked_fill(distance < 0, 0)


def decode(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, memory: BlockMemory) -> Tensor:
    """As `interface.lightning_decode`: fold a full block, append the token, run over the open block."""
    state, k_cache, v_cache, seqlens = memory
    outs = []
    for b, count in enumerate(seqlens.tolist()):
        one = slice(b, b + 1)
        if count == BLOCK:
            k_block, v_block = k_cache[one, :BLOCK], v_cache[one, :BLOCK]
            state[one] = recurrence(k_block, k_block, v_block, log_decay, state[one], None)[1]
            count = 0
        k_cache[b, count], v_cache[b, count] = k[b, 0], v[b, 0]
        seqlens[b] = count + 1
        k_open, v_open = k_cache[one, : count + 1], v_cache[one, : count + 1]
        final = recurrence(k_open, k_open, v_open, log_decay, state[one], None)[1]
        outs.append((q[one, 0, :, None].to(final.dtype) @ final).squeeze(-2))
    return torch.stack(outs, dim=0).to(v.dtype) if outs else torch.zeros_like(v)


def _run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    decay = log_decay.to(state.dtype).exp()[:, None, None]
    outs = []
    for t in range(q.shape[1]):
        q_t, k_t, v_t = (x[:, t].to(state.dtype) for x in (q, k, v))  # (B, H, D)
        state = decay * state + k_t[..., :, None] * v_t[..., None, :]
        outs.append((q_t[..., None, :] @ state).squeeze(-2))
    return torch.stack(outs, dim=1).to(v.dtype) if outs else torch.zeros_like(v), state
