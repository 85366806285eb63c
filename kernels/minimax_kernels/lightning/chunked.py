"""Lightning attention by blocks in plain PyTorch: the backend of a machine without a GPU.

Within a block of C positions, with g = log_decay and the state at the block's start:

    out[i]     = exp(g (i+1)) q[i] @ state + sum_{j <= i} exp(g (i-j)) (q[i] . k[j]) v[j]
    next state = exp(g n) state + sum_j exp(g (n-1-j)) outer(k[j], v[j])        n positions in the block

Every exponent is at most 0. Many blocks are computed at once; only the short sum over block states runs in
order. Autograd differentiates it. `decode` replays one block with the same `_tile`, so its outputs have the
bits of the forward's.
"""

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from .memory import BLOCK, BlockMemory

# Queries of a block computed together; later keys are left out. Decoding computes one such group, in 55 us
# where the whole block takes 148, and the forward loses nothing (H = 8, D = 64, one thread of an AMD EPYC).
QUERIES = 16
assert BLOCK % QUERIES == 0
# Elements of q worked on at once: its float32 copies and products then stay in a core's L2 cache.
WORKING_SET = 2**18


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    cu_seqlens: Tensor | None,
    *,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Shapes and rules as in `interface.lightning_attention`; `state` (S, H, Dk, Dv) has the working type.

    lengths: (B,) tokens of each sequence, without cu_seqlens: then come positions of k = v = 0 whose outputs
        mean nothing, and the state is the one after the last token.
    """
    B, T, H, Dk = q.shape
    if cu_seqlens is not None:
        return _run(_Blocks.packed(cu_seqlens, T), q, k, v, log_decay, state)
    step = max(WORKING_SET // max(B * H * Dk, 1) // BLOCK, 1) * BLOCK
    outs: list[Tensor] = []
    # split, not slices: the gradient of a slice is as large as the whole
    parts = zip(q.split(step, dim=1), k.split(step, dim=1), v.split(step, dim=1), strict=True)
    for q_part, k_part, v_part in parts if T else ():
        left = None if lengths is None else lengths - len(outs) * step
        blocks = _Blocks.dense(B, q_part.shape[1], v.device, left)
        out, state = _run(blocks, q_part, k_part, v_part, log_decay, state)
        outs.append(out)
    return (torch.cat(outs, dim=1), state) if outs else (torch.zeros_like(v), state.clone())


def decode(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, memory: BlockMemory) -> Tensor:
    """One token for each sequence by replaying its open block; see `interface.lightning_decode`."""
    log_decay = log_decay.to(memory.state.dtype)
    lengths = memory.cache_seqlens.tolist()
    if not lengths:
        return torch.empty_like(v)
    if BLOCK in lengths:
        _fold_full_blocks(memory, log_decay, filled=min(lengths))
    position = memory.cache_seqlens.clone()  # (B,)
    sequence = torch.arange(len(lengths), device=position.device)
    memory.k_cache[sequence, position] = k[:, 0]
    memory.v_cache[sequence, position] = v[:, 0]
    memory.cache_seqlens.add_(1)
    return _replay(q, memory, position, [length % BLOCK for length in lengths], log_decay).to(v.dtype)


def _fold_full_blocks(memory: BlockMemory, log_decay: Tensor, *, filled: int) -> None:
    state, k_cache, v_cache, seqlens = memory
    k, v = (_as_tile(cache, seqlens, BLOCK, filled, state.dtype) for cache in (k_cache, v_cache))
    increment, decay = _advance(k, v, log_decay, seqlens)
    full = seqlens == BLOCK
    state.copy_(torch.where(full[:, None, None, None], decay * state + increment, state))
    seqlens.masked_fill_(full, 0)


def _replay(
    q: Tensor, memory: BlockMemory, position: Tensor, positions: list[int], log_decay: Tensor
) -> Tensor:
    """Outputs (B, 1, H, Dv) at `position` (B,) of each open block; `positions` are the same on the host."""
    state = memory.state
    starts = {p // QUERIES * QUERIES for p in positions}  # of the groups of queries that are computed
    width, filled = max(starts) + QUERIES, min(positions) + 1
    k, v = (
        _as_tile(cache, memory.cache_seqlens, width, filled, state.dtype)
        for cache in (memory.k_cache, memory.v_cache)
    )
    distance = position[:, None, None] - torch.arange(width, device=position.device)  # (B, 1, width)
    pair_decay = _decay(log_decay, distance)  # the group's other queries are zero: one decay serves them
    state_decay = (log_decay * (position[:, None] + 1)).exp()[..., None, None]
    out = state.new_empty(*q.shape[:3], v.shape[-1])
    for start in starts:
        mine = slice(None) if len(starts) == 1 else position // QUERIES * QUERIES == start
        place = position[mine] - start
        index = (torch.arange(len(place), device=place.device), slice(None), place)
        queries = state.new_zeros(len(place), q.shape[2], QUERIES, q.shape[3])
        queries[index] = q[mine, 0].to(state.dtype)
        keys = slice(start + QUERIES)
        decays = pair_decay[mine, ..., keys], state_decay[mine]
        tile = _tile(queries, k[mine, :, keys], v[mine, :, keys], state[mine], *decays)
        out[mine, 0] = tile[index]
    return out


def _run(
    blocks: "_Blocks", q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    if not blocks.lengths.shape[0]:
        return torch.zeros_like(v), state.clone()
    log_decay = log_decay.to(state.dtype)
    q_blocks, k_blocks, v_blocks = (blocks.split(x).to(state.dtype).contiguous() for x in (q, k, v))
    increment, decay = _advance(k_blocks, v_blocks, log_decay, blocks.lengths)
    starts, last = _scan(state[blocks.order], increment, decay, blocks.active)
    i = torch.arange(blocks.width, device=q.device)
    pair_decay = _decay(log_decay, i[:, None] - i)  # (H, C, C)
    state_decay = (log_decay[:, None] * (i + 1)).exp()[..., None]  # (H, C, 1)
    outs = []
    for first in range(0, blocks.width, QUERIES):
        queries, keys = slice(first, first + QUERIES), slice(first + QUERIES)
        tiles = (q_blocks[:, :, queries], k_blocks[:, :, keys], v_blocks[:, :, keys])
        decays = pair_decay[:, queries, keys], state_decay[:, queries]
        outs.append(_tile(*tiles, starts, *decays).to(v.dtype))
    return blocks.join(torch.cat(outs, dim=2), v), last[blocks.order.argsort()]


def _as_tile(cache: Tensor, seqlens: Tensor, width: int, filled: int, dtype: torch.dtype) -> Tensor:
    """The first `width` positions of a cache (B, R, H, D) as a tile (B, H, width, D), zero from `seqlens` on.

    Every sequence has filled at least `filled`, so only what comes after is looked at.
    """
    tile = cache[:, :width].transpose(1, 2).to(dtype, memory_format=torch.contiguous_format, copy=True)
    unwritten = torch.arange(filled, width, device=seqlens.device) >= seqlens[:, None]
    tile[:, :, filled:].masked_fill_(unwritten[:, None, :, None], 0)
    return tile


def _tile(q: Tensor, k: Tensor, v: Tensor, state: Tensor, pair_decay: Tensor, state_decay: Tensor) -> Tensor:
    """Outputs (K, H, QUERIES, Dv) of some queries of K blocks, from the keys they see and the first states.

    `pair_decay` (H, QUERIES, keys) is the decay between a query and a key of its block, `state_decay`
    (H, QUERIES, 1) that from the block's start.
    """
    scores = (q @ k.mT).mul_(pair_decay)
    inter = (q @ state).mul_(state_decay)
    return inter.flatten(0, 1).baddbmm_(scores.flatten(0, 1), v.flatten(0, 1)).view(inter.shape)


def _decay(log_decay: Tensor, distance: Tensor) -> Tensor:
    """exp(log_decay * distance) for every head, (..., H, R, C) from distances (..., R, C); 0 below zero."""
    distance = distance[..., None, :, :]
    faded = (log_decay[:, None, None] * distance.clamp(min=0)).exp()
    return faded.masked_fill_(distance < 0, 0)


def _advance(k: Tensor, v: Tensor, log_decay: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """What K blocks of `lengths` (K,) positions add to the state (K, H, Dk, Dv), and how they decay it."""
    j = torch.arange(k.shape[-2], device=k.device)
    distance = (lengths[:, None] - 1 - j).clamp(min=0)  # (K, C)
    pair_decay = (log_decay[None, :, None] * distance[:, None]).exp()[..., None]  # (K, H, C, 1)
    decay = (log_decay * lengths[:, None]).exp()[..., None, None]  # (K, H, 1, 1)
    return k.mT @ (v * pair_decay), decay


def _scan(state: Tensor, increment: Tensor, decay: Tensor, active: list[int]) -> tuple[Tensor, Tensor]:
    """First state of every block (K, H, Dk, Dv), and the last state of every sequence (S, H, Dk, Dv).

    Blocks come step by step: step n holds the n-th block of the `active[n]` longest sequences.
    """
    starts, finished, first = [], [], 0
    for count in active:
        finished.append(state[count:])
        state = state[:count]
        starts.append(state)
        step = slice(first, first + count)
        state = decay[step] * state + increment[step]
        first += count
    return torch.cat(starts), torch.cat([state, *reversed(finished)])


@dataclass
class _Blocks:
    """How sequences are cut into blocks, longest sequence first, step by step (see `_scan`).

    C is `BLOCK`, or less where every sequence ends within its first block.
    """

    lengths: Tensor  # (K,) positions in each block
    active: list[int]  # blocks in each step
    order: Tensor  # (S,) sequences by falling length
    index: Tensor | None  # (K, C) place of each position in a packed input, T where there is none
    shape: tuple[int, int]  # (B, T)
    width: int  # C

    @classmethod
    def dense(cls, B: int, T: int, device: torch.device, lengths: Tensor | None = None) -> "_Blocks":
        """Of B sequences of T positions; only the first `lengths` (B,) of each count."""
        steps = -(-T // BLOCK) if B else 0
        if lengths is None:
            in_block = torch.full((steps, B), BLOCK, device=device)
            if steps:
                in_block[-1] = T - (steps - 1) * BLOCK
        else:
            start = torch.arange(steps, device=device)[:, None] * BLOCK
            in_block = (lengths - start).clamp(0, BLOCK)
        order = torch.arange(B, device=device)
        return cls(in_block.flatten(), [B] * steps, order, None, (B, T), _width(T))

    @classmethod
    def packed(cls, cu_seqlens: Tensor, T: int) -> "_Blocks":
        bounds = cu_seqlens.to("cpu", torch.int64)
        starts, sizes = bounds[:-1], bounds.diff()
        order = sizes.argsort(descending=True, stable=True)
        starts, sizes = starts[order], sizes[order]
        longest = int(sizes[0]) if len(sizes) else 0
        steps, width = -(-longest // BLOCK), _width(longest)
        offset = torch.arange(steps)[:, None] * BLOCK
        inside = offset < sizes  # (steps, S)
        lengths = (sizes - offset)[inside].clamp(max=BLOCK)
        first = (starts + offset)[inside]
        column = torch.arange(width)
        index = torch.where(column < lengths[:, None], first[:, None] + column, T)
        device = cu_seqlens.device
        active = inside.sum(1).tolist()
        return cls(lengths.to(device), active, order.to(device), index.to(device), (1, T), width)

    def split(self, x: Tensor) -> Tensor:
        """(B, T, H, D) to blocks (K, H, C, D); positions past a sequence's end hold zeros."""
        B, T = self.shape
        if self.index is not None:
            return pad(x[0], (0, 0, 0, 0, 0, 1))[self.index].transpose(1, 2)
        x = pad(x, (0, 0, 0, 0, 0, len(self.active) * self.width - T))
        return rearrange(x, "b (n c) h d -> (n b) h c d", c=self.width)

    def join(self, blocks: Tensor, like: Tensor) -> Tensor:
        """Blocks (K, H, C, D) back to (B, T, H, D); zero where no sequence is."""
        B, T = self.shape
        if self.index is not None:
            inside = self.index < T
            out = torch.zeros_like(like[0])
            return out.index_put((self.index[inside],), blocks.transpose(1, 2)[inside])[None]
        return rearrange(blocks, "(n b) h c d -> b (n c) h d", b=B)[:, :T]


def _width(longest: int) -> int:
    return min(BLOCK, -(-longest // QUERIES) * QUERIES)
