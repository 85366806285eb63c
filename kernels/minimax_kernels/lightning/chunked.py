"""Lightning attention by blocks in plain PyTorch: the backend of a machine without a GPU.

Within a block of C positions, with g = log_decay and the state at the block's start:

    out[i]     = exp(g (i+1)) q[i] @ state + sum_{j <= i} exp(g (i-j)) (q[i] . k[j]) v[j]
    next state = exp(g n) state + sum_j exp(g (n-1-j)) outer(k[j], v[j])        n rows in the block

Every exponent is at most 0. All blocks of all sequences are computed at once; only the short sum over block
states runs in order. Autograd differentiates it. `decode` replays one block with the same `_tile`, so a decoded
row has the forward's bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..packing import BLOCK


def chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Shapes and rules as in `interface.lightning_attention`; `state` (S, H, Dk, Dv) has the working type."""
    B, T = v.shape[:2]
    blocks = _Blocks.dense(B, T, v.device) if cu_seqlens is None else _Blocks.packed(cu_seqlens, T)
    if blocks.lengths.numel() == 0:
        return torch.zeros_like(v), state.clone()
    q_blocks, k_blocks, v_blocks = (blocks.split(x).to(state.dtype).contiguous() for x in (q, k, v))
    log_decay = log_decay.to(state.dtype)
    gain, fade = _advance(k_blocks, v_blocks, log_decay, blocks.lengths)
    starts, last = _scan(state[blocks.order], gain, fade, blocks.active)
    out = _tile(q_blocks, k_blocks, v_blocks, starts, log_decay)
    return blocks.join(out.to(v.dtype), v), last[blocks.order.argsort()]


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    state: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    counts: Tensor,
) -> Tensor:
    """One token for each sequence by replaying its open block; see `interface.lightning_decode`."""
    log_decay = log_decay.to(state.dtype)
    full = counts == BLOCK
    if full.any():
        k_block, v_block = (_as_block(x, counts, state.dtype) for x in (k_rows, v_rows))
        gain, fade = _advance(k_block, v_block, log_decay, counts)
        state.copy_(torch.where(full[:, None, None, None], fade * state + gain, state))
        counts.masked_fill_(full, 0)
    row = torch.arange(len(counts), device=counts.device)
    position = counts.clone()
    k_rows[row, position] = k[:, 0]
    v_rows[row, position] = v[:, 0]
    counts += 1
    k_block, v_block = (_as_block(x, counts, state.dtype) for x in (k_rows, v_rows))
    q_block = torch.zeros(*k_block.shape, dtype=state.dtype, device=q.device)  # (B, H, C, Dk)
    q_block[row, :, position] = q[:, 0].to(state.dtype)
    out = _tile(q_block, k_block, v_block, state, log_decay)
    return out[row, :, position].to(v.dtype)[:, None]


def _as_block(rows: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """The first BLOCK rows (B, R, H, D) as a tile (B, H, C, D), with zeros where nothing was written."""
    held = torch.arange(BLOCK, device=rows.device) < counts[:, None]
    return torch.where(held[:, :, None, None], rows[:, :BLOCK], 0).to(dtype).transpose(1, 2).contiguous()


def _tile(q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor) -> Tensor:
    """Outputs (K, H, C, Dv) of K blocks from their rows (K, H, C, D) and first states (K, H, Dk, Dv)."""
    i = torch.arange(q.shape[-2], device=q.device)
    distance = i[:, None] - i[None, :]
    weight = (log_decay[:, None, None] * distance.clamp(min=0)).exp() * (distance >= 0)  # (H, C, C)
    reach = (log_decay[:, None] * (i + 1)).exp()[..., None]  # (H, C, 1)
    return (q @ k.mT * weight) @ v + (q @ state) * reach


def _advance(k: Tensor, v: Tensor, log_decay: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """What K blocks with `lengths` (K,) rows add to the state, (K, H, Dk, Dv), and how they fade it, (K, H, 1, 1)."""
    j = torch.arange(k.shape[-2], device=k.device)
    distance = (lengths[:, None] - 1 - j).clamp(min=0)  # (K, C)
    weight = (log_decay[None, :, None] * distance[:, None]).exp()[..., None]  # (K, H, C, 1)
    fade = (log_decay * lengths[:, None]).exp()[..., None, None]
    return k.mT @ (v * weight), fade


def _scan(state: Tensor, gain: Tensor, fade: Tensor, active: list[int]) -> tuple[Tensor, Tensor]:
    """First state of every block (K, H, Dk, Dv), and the last state of every sequence (S, H, Dk, Dv).

    Blocks come step by step: step n holds the n-th block of the `active[n]` longest sequences.
    """
    starts, finished, first = [], [], 0
    for count in active:
        finished.append(state[count:])
        state = state[:count]
        starts.append(state)
        step = slice(first, first + count)
        state = fade[step] * state + gain[step]
        first += count
    return torch.cat(starts), torch.cat([state, *reversed(finished)])


@dataclass
class _Blocks:
    """How sequences are cut into blocks, longest sequence first, step by step (see `_scan`)."""

    lengths: Tensor  # (K,) rows in each block
    active: list[int]  # blocks in each step
    order: Tensor  # (S,) sequences by falling length
    rows: Tensor | None  # (K, C) row of each position in a packed input, T where there is none
    shape: tuple[int, int]  # (B, T)

    @classmethod
    def dense(cls, B: int, T: int, device: torch.device) -> "_Blocks":
        steps = -(-T // BLOCK) if B else 0
        lengths = torch.full((steps, B), BLOCK, device=device)
        if steps:
            lengths[-1] = T - (steps - 1) * BLOCK
        return cls(lengths.flatten(), [B] * steps, torch.arange(B, device=device), None, (B, T))

    @classmethod
    def packed(cls, cu_seqlens: Tensor, T: int) -> "_Blocks":
        bounds = cu_seqlens.to("cpu", torch.int64)
        starts, sizes = bounds[:-1], bounds.diff()
        order = sizes.argsort(descending=True, stable=True)
        starts, sizes = starts[order], sizes[order]
        steps = -(-int(sizes[0]) // BLOCK) if len(sizes) else 0
        offset = torch.arange(steps)[:, None] * BLOCK
        held = offset < sizes  # (steps, S)
        lengths = (sizes - offset)[held].clamp(max=BLOCK)
        first = (starts + offset)[held]
        column = torch.arange(BLOCK)
        rows = torch.where(column < lengths[:, None], first[:, None] + column, T)
        device = cu_seqlens.device
        return cls(lengths.to(device), held.sum(1).tolist(), order.to(device), rows.to(device), (1, T))

    def split(self, x: Tensor) -> Tensor:
        """(B, T, H, D) to blocks (K, H, C, D); positions past a sequence's end hold zeros."""
        B, T = self.shape
        if self.rows is not None:
            return pad(x[0], (0, 0, 0, 0, 0, 1))[self.rows].transpose(1, 2)
        steps = len(self.active)
        x = pad(x, (0, 0, 0, 0, 0, steps * BLOCK - T))
        return x.unflatten(1, (steps, BLOCK)).permute(1, 0, 3, 2, 4).flatten(0, 1)

    def join(self, blocks: Tensor, like: Tensor) -> Tensor:
        """Blocks (K, H, C, D) back to (B, T, H, D); rows that no sequence holds are zero."""
        B, T = self.shape
        if self.rows is not None:
            held = self.rows < T
            out = torch.zeros_like(like[0])
            return out.index_put((self.rows[held],), blocks.transpose(1, 2)[held])[None]
        steps = len(self.active)
        out = blocks.unflatten(0, (steps, B)).permute(1, 0, 3, 2, 4).flatten(1, 2)
        return out[:, :T].contiguous()
