"""Lightning attention by blocks in plain PyTorch: the backend of a machine without a GPU.

Within a block of C positions, with g = log_decay and the state at the block's start:

    out[i]     = exp(g (i+1)) q[i] @ state + sum_{j <= i} exp(g (i-j)) (q[i] . k[j]) v[j]
    next state = exp(g n) state + sum_j exp(g (n-1-j)) outer(k[j], v[j])        n rows in the block

Every exponent is at most 0. Many blocks are computed at once; only the short sum over block states runs in
order. Autograd differentiates it. `decode` replays one block with the same `_tile`, so its rows have the
bits of the forward's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..packing import BLOCK

# Query rows of a block computed together; later keys are left out. Decoding computes one such group, in 55 us
# where the whole block takes 148, and the forward loses nothing (H = 8, D = 64, one thread of an AMD EPYC).
ROWS = 16
# Elements of q worked on at once: its float32 copies and products then stay in a core's L2 cache.
WORKING_SET = 2**18


def chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Shapes and rules as in `interface.lightning_attention`; `state` (S, H, Dk, Dv) has the working type."""
    B, T, H, Dk = q.shape
    if cu_seqlens is not None:
        return _run(_Blocks.packed(cu_seqlens, T), q, k, v, log_decay, state)
    step = max(WORKING_SET // max(B * H * Dk, 1) // BLOCK, 1) * BLOCK
    outs = []
    # split, not slices: the gradient of a slice is as large as the whole
    for part in zip(*(x.split(step, dim=1) for x in (q, k, v)), strict=True) if T else ():
        out, state = _run(_Blocks.dense(B, part[0].shape[1], v.device), *part, log_decay, state)
        outs.append(out)
    return (torch.cat(outs, dim=1), state) if outs else (torch.zeros_like(v), state.clone())


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    state: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    counts: Tensor,
) -> Tensor:
    """One token for each sequence by replaying its open block; see `interface.lightning_decode`."""
    log_decay = log_decay.to(state.dtype)
    held = counts.tolist()
    if not held:
        return torch.empty_like(v)
    if BLOCK in held:
        k_block, v_block = (_as_tile(x, counts, BLOCK, min(held), state.dtype) for x in (k_cache, v_cache))
        gain, fade = _advance(k_block, v_block, log_decay, counts)
        full = counts == BLOCK
        state.copy_(torch.where(full[:, None, None, None], fade * state + gain, state))
        counts.masked_fill_(full, 0)
    position = counts.clone()
    sequence = torch.arange(len(held), device=counts.device)
    k_cache[sequence, position] = k[:, 0]
    v_cache[sequence, position] = v[:, 0]
    counts += 1
    positions = [count % BLOCK for count in held]
    firsts = {p // ROWS * ROWS for p in positions}
    width, written = max(firsts) + ROWS, min(positions) + 1
    k_block, v_block = (_as_tile(x, counts, width, written, state.dtype) for x in (k_cache, v_cache))
    distance = position[:, None, None] - torch.arange(width, device=counts.device)  # (B, 1, width)
    # the other rows of q are zero, so one row's weights serve them all
    weight = _decay(log_decay, distance)
    reach = (log_decay * (position[:, None] + 1)).exp()[..., None, None]
    out = torch.empty_like(v)
    for first in firsts:
        together = slice(None) if len(firsts) == 1 else position // ROWS * ROWS == first
        row = position[together] - first
        q_rows = state.new_zeros(row.shape[0], q.shape[2], ROWS, q.shape[3])
        mine = (torch.arange(row.shape[0], device=row.device), slice(None), row)
        q_rows[mine] = q[together, 0].to(state.dtype)
        keys = slice(first + ROWS)
        tile = _tile(
            q_rows,
            k_block[together, :, keys],
            v_block[together, :, keys],
            state[together],
            weight[together, ..., keys],
            reach[together],
        )
        out[together, 0] = tile[mine].to(v.dtype)
    return out


def _run(
    blocks: "_Blocks", q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    if not blocks.lengths.shape[0]:
        return torch.zeros_like(v), state.clone()
    log_decay = log_decay.to(state.dtype)
    q_blocks, k_blocks, v_blocks = (blocks.split(x).to(state.dtype).contiguous() for x in (q, k, v))
    gain, fade = _advance(k_blocks, v_blocks, log_decay, blocks.lengths)
    starts, last = _scan(state[blocks.order], gain, fade, blocks.active)
    i = torch.arange(blocks.width, device=q.device)
    weight = _decay(log_decay, i[:, None] - i)  # (H, C, C)
    reach = (log_decay[:, None] * (i + 1)).exp()[..., None]  # (H, C, 1)
    outs = []
    for first in range(0, blocks.width, ROWS):
        rows, keys = slice(first, first + ROWS), slice(first + ROWS)
        pairs = (q_blocks[:, :, rows], k_blocks[:, :, keys], v_blocks[:, :, keys])
        outs.append(_tile(*pairs, starts, weight[:, rows, keys], reach[:, rows]).to(v.dtype))
    return blocks.join(torch.cat(outs, dim=2), v), last[blocks.order.argsort()]


def _as_tile(rows: Tensor, counts: Tensor, width: int, written: int, dtype: torch.dtype) -> Tensor:
    """The first `width` of rows (B, R, H, D) as a tile (B, H, width, D), zero from `counts` (B,) on.

    Every sequence has at least `written`, so only what comes after is looked at.
    """
    tile = rows[:, :width].transpose(1, 2).to(dtype, memory_format=torch.contiguous_format, copy=True)
    unwritten = torch.arange(written, width, device=counts.device) >= counts[:, None]
    tile[:, :, written:].masked_fill_(unwritten[:, None, :, None], 0)
    return tile


def _tile(q: Tensor, k: Tensor, v: Tensor, state: Tensor, weight: Tensor, reach: Tensor) -> Tensor:
    """Outputs (K, H, ROWS, Dv) of some rows of K blocks, from the keys they see and the blocks' first states.

    `weight` (H, ROWS, keys) fades the pairs within a block, `reach` (H, ROWS, 1) what the state brings.
    """
    pairs = (q @ k.mT).mul_(weight)
    carried = (q @ state).mul_(reach)
    return carried.flatten(0, 1).baddbmm_(pairs.flatten(0, 1), v.flatten(0, 1)).view(carried.shape)


def _decay(log_decay: Tensor, distance: Tensor) -> Tensor:
    """exp(log_decay * distance) for every head, (..., H, R, C) from distances (..., R, C); 0 below zero."""
    distance = distance[..., None, :, :]
    faded = (log_decay[:, None, None] * distance.clamp(min=0)).exp()
    return faded.masked_fill_(distance < 0, 0)


def _advance(k: Tensor, v: Tensor, log_decay: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """What K blocks of `lengths` (K,) rows add to the state (K, H, Dk, Dv), and how they fade it."""
    j = torch.arange(k.shape[-2], device=k.device)
    distance = (lengths[:, None] - 1 - j).clamp(min=0)  # (K, C)
    weight = (log_decay[None, :, None] * distance[:, None]).exp()[..., None]  # (K, H, C, 1)
    fade = (log_decay * lengths[:, None]).exp()[..., None, None]  # (K, H, 1, 1)
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
    """How sequences are cut into blocks, longest sequence first, step by step (see `_scan`).

    C is `BLOCK`, or less where every sequence ends within its first block.
    """

    lengths: Tensor  # (K,) rows in each block
    active: list[int]  # blocks in each step
    order: Tensor  # (S,) sequences by falling length
    rows: Tensor | None  # (K, C) row of each position in a packed input, T where there is none
    shape: tuple[int, int]  # (B, T)
    width: int  # C

    @classmethod
    def dense(cls, B: int, T: int, device: torch.device) -> "_Blocks":
        steps = -(-T // BLOCK) if B else 0
        lengths = torch.full((steps, B), BLOCK, device=device)
        if steps:
            lengths[-1] = T - (steps - 1) * BLOCK
        order = torch.arange(B, device=device)
        return cls(lengths.flatten(), [B] * steps, order, None, (B, T), _width(T))

    @classmethod
    def packed(cls, cu_seqlens: Tensor, T: int) -> "_Blocks":
        bounds = cu_seqlens.to("cpu", torch.int64)
        starts, sizes = bounds[:-1], bounds.diff()
        order = sizes.argsort(descending=True, stable=True)
        starts, sizes = starts[order], sizes[order]
        longest = int(sizes[0]) if len(sizes) else 0
        steps, width = -(-longest // BLOCK), _width(longest)
        offset = torch.arange(steps)[:, None] * BLOCK
        held = offset < sizes  # (steps, S)
        lengths = (sizes - offset)[held].clamp(max=BLOCK)
        first = (starts + offset)[held]
        column = torch.arange(width)
        rows = torch.where(column < lengths[:, None], first[:, None] + column, T)
        device = cu_seqlens.device
        active = held.sum(1).tolist()
        return cls(lengths.to(device), active, order.to(device), rows.to(device), (1, T), width)

    def split(self, x: Tensor) -> Tensor:
        """(B, T, H, D) to blocks (K, H, C, D); positions past a sequence's end hold zeros."""
        B, T = self.shape
        if self.rows is not None:
            return pad(x[0], (0, 0, 0, 0, 0, 1))[self.rows].transpose(1, 2)
        steps = len(self.active)
        x = pad(x, (0, 0, 0, 0, 0, steps * self.width - T))
        return x.unflatten(1, (steps, self.width)).permute(1, 0, 3, 2, 4).flatten(0, 1)

    def join(self, blocks: Tensor, like: Tensor) -> Tensor:
        """Blocks (K, H, C, D) back to (B, T, H, D); rows that no sequence holds are zero."""
        B, T = self.shape
        if self.rows is not None:
            held = self.rows < T
            out = torch.zeros_like(like[0])
            return out.index_put((self.rows[held],), blocks.transpose(1, 2)[held])[None]
        steps = len(self.active)
        out = blocks.unflatten(0, (steps, B)).permute(1, 0, 3, 2, 4).flatten(1, 2)
        return out[:, :T]


def _width(longest: int) -> int:
    return min(BLOCK, -(-longest // ROWS) * ROWS)
