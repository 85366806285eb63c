"""New positions after what a `BlockMemory` holds. Pure functions: a new memory comes back.

Blocks count from a sequence's own first token, wherever padding lies, so the outputs have the bits of one
`lightning_attention` over everything. Positions are folded into the state in whole blocks, and only so far
that the last `max_rollback` of them can still be taken back by lowering `cache_seqlens`.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..backends import Backend, accumulation_dtype, choose, tracing, without_autocast
from ..packing import pack, unpack
from .chunked import chunked
from .interface import lightning_attention
from .memory import BLOCK, BlockMemory


def padded_lightning_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    token_mask: Tensor | None,
    initial_state: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """`lightning_attention` over a padded batch: `token_mask` (B, T) hides what is not part of a sequence.

    The tokens of each sequence are packed, so blocks count from its first token wherever the padding lies.
    """
    if token_mask is None:
        return lightning_attention(q, k, v, log_decay, initial_state=initial_state, backend=backend)
    if tracing() and choose(backend, q) != "reference":
        return _padded_in_a_trace(q, k, v, log_decay, token_mask, initial_state, backend)
    (q, cu_seqlens), (k, _), (v, _) = (pack(x, token_mask) for x in (q, k, v))
    out, final_state = lightning_attention(
        q, k, v, log_decay, initial_state=initial_state, cu_seqlens=cu_seqlens, backend=backend
    )
    return unpack(out, token_mask), final_state


def _padded_in_a_trace(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    token_mask: Tensor,
    initial_state: Tensor | None,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """The same in shapes that depend on no value: tokens move in front of the padding, and back again."""
    B, T, H, Dk = k.shape
    batch = torch.arange(B, device=k.device)[:, None]
    order = (~token_mask).to(torch.int8).argsort(dim=1, stable=True)  # (B, T)
    lengths = token_mask.sum(1)
    shown = torch.arange(T, device=k.device) < lengths[:, None]
    q, k, v = (x[batch, order].where(shown[..., None, None], 0) for x in (q, k, v))
    if initial_state is None:
        initial_state = k.new_zeros(B, H, Dk, v.shape[-1], dtype=accumulation_dtype(k))
    if choose(backend, q) == "chunked":
        with without_autocast(q):
            out, final_state = chunked(q, k, v, log_decay, initial_state, None, lengths=lengths)
    else:
        # the padding of each is one more sequence
        starts = torch.stack([torch.zeros_like(lengths), lengths], dim=1) + batch * T
        bounds = pad(starts.flatten(), (0, 1), value=B * T).to(torch.int32)
        out, states = lightning_attention(
            q.flatten(0, 1)[None], k.flatten(0, 1)[None], v.flatten(0, 1)[None], log_decay,
            initial_state=initial_state.repeat_interleave(2, dim=0), cu_seqlens=bounds, backend=backend,
        )  # fmt: skip
        out, final_state = out.view(v.shape), states[::2]
    return out[batch, order.argsort(dim=1)].where(token_mask[..., None, None], 0), final_state


def current_state(memory: BlockMemory, log_decay: Tensor) -> Tensor:
    """The state (S, H, Dk, Dv) after the last position of every sequence."""
    return _advanced(memory, log_decay, memory.cache_seqlens)


def fold(memory: BlockMemory, log_decay: Tensor) -> BlockMemory:
    """The same memory with every full block in the state; the caches have room for one block."""
    full = memory.cache_seqlens // BLOCK * BLOCK
    return BlockMemory(
        _advanced(memory, log_decay, full),
        _positions_from(memory.k_cache, full),
        _positions_from(memory.v_cache, full),
        memory.cache_seqlens - full,
    )


def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    memory: BlockMemory,
    *,
    token_mask: Tensor | None,
    max_rollback: int,
    backend: Backend = "auto",
) -> tuple[Tensor, BlockMemory]:
    """Outputs (S, T, H, Dv) of T new positions, and the memory with them; the given one is unchanged.

    Args:
        q, k, v: (S, T, H, D), as in `lightning_attention`.
        token_mask: (S, T) bool, false at padding, which leaves no trace; None if there is none.
        max_rollback: keep at least the last so many tokens out of the state.
    """
    lengths = memory.cache_seqlens.tolist()
    if token_mask is None and min(lengths) == max(lengths):
        return _extend_aligned(q, k, v, log_decay, memory, lengths[0], max_rollback, backend)
    S, T = q.shape[:2]
    if token_mask is None:
        token_mask = q.new_ones(S, T, dtype=torch.bool)
    R = memory.k_cache.shape[1]
    cached = torch.arange(R, device=q.device) < memory.cache_seqlens[:, None]
    mask = torch.cat([cached, token_mask], dim=1)  # (S, R + T)
    q = torch.cat([torch.zeros_like(memory.k_cache), q], dim=1)
    k, v = torch.cat([memory.k_cache, k], dim=1), torch.cat([memory.v_cache, v], dim=1)
    rank = mask.long().cumsum(1) - 1
    folded = _foldable(mask.sum(1), max_rollback)  # (S,)
    state, out = memory.state, torch.zeros_like(v)
    if bool(folded.any()):
        head = mask & (rank < folded[:, None])
        out, state = padded_lightning_attention(
            q, k, v, log_decay, token_mask=head, initial_state=state, backend=backend
        )
    tail = mask & (rank >= folded[:, None])
    out_tail, _ = padded_lightning_attention(
        q, k, v, log_decay, token_mask=tail, initial_state=state, backend=backend
    )
    return (out + out_tail)[:, R:], _memory_of(state, k, v, tail)


def extend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    cu_seqlens: Tensor,
    last_document: Tensor,
    max_rollback: int,
    backend: Backend = "auto",
) -> tuple[Tensor, BlockMemory]:
    """Outputs of packed documents, and the memory of the one that ends each batch entry.

    Args:
        q, k, v: (B, T, H, D), entry after entry one packed sequence of B * T positions.
        cu_seqlens: (S + 1,) bounds of the documents in it.
        last_document: (B, T) bool, the positions of each entry's last document.
    """
    B, T = last_document.shape
    rank = last_document.long().cumsum(1) - 1
    folded = _foldable(last_document.sum(1), max_rollback)  # (B,)
    tail = last_document & (rank >= folded[:, None])
    # A long last document is cut where its memory begins, so that its state there is a final state. What
    # follows the cut starts from zeros here, and is computed again from that state where there is one.
    start = (~tail).sum(1) + torch.arange(B, device=q.device) * T  # (B,)
    bounds = torch.cat([cu_seqlens.long(), start]).unique()
    out, states = lightning_attention(
        q.flatten(0, 1)[None], k.flatten(0, 1)[None], v.flatten(0, 1)[None], log_decay,
        cu_seqlens=bounds.to(cu_seqlens.dtype), backend=backend,
    )  # fmt: skip
    out = out.view(v.shape)
    before = states[(torch.searchsorted(bounds, start) - 1).clamp(min=0)]
    state = before.where((folded > 0)[:, None, None, None], 0)
    if bool(folded.any()):
        again, _ = padded_lightning_attention(
            q, k, v, log_decay, token_mask=tail, initial_state=state, backend=backend
        )
        out = torch.where(tail[..., None, None], again, out)
    return out, _memory_of(state, k, v, tail)


def _extend_aligned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    memory: BlockMemory,
    cached: int,
    max_rollback: int,
    backend: Backend,
) -> tuple[Tensor, BlockMemory]:
    """The same where all sequences have filled equally much and nothing is padded: no position moves."""
    if cached:
        k_cache, v_cache = memory.k_cache[:, :cached], memory.v_cache[:, :cached]
        q = torch.cat([torch.zeros_like(k_cache), q], dim=1)
        k, v = torch.cat([k_cache, k], dim=1), torch.cat([v_cache, v], dim=1)
    state, outs, total = memory.state, [], k.shape[1]
    folded = int(_foldable(torch.tensor(total), max_rollback))
    if folded:
        head = slice(0, folded)
        out, state = lightning_attention(
            q[:, head], k[:, head], v[:, head], log_decay, initial_state=state, backend=backend
        )
        outs.append(out)
        q, k, v = q[:, folded:], k[:, folded:], v[:, folded:]
    outs.append(lightning_attention(q, k, v, log_decay, initial_state=state, backend=backend)[0])
    room = max(BLOCK - k.shape[1], 0)
    # copies: the caller's buffers are wider, and memory must not keep them
    k_cache, v_cache = (pad(x, (0, 0, 0, 0, 0, room)) if room else x.clone() for x in (k, v))
    seqlens = torch.full_like(memory.cache_seqlens, total - folded)
    return torch.cat(outs, dim=1)[:, cached:], BlockMemory(state, k_cache, v_cache, seqlens)


def _foldable(total: Tensor, max_rollback: int) -> Tensor:
    """How many of `total` positions go into the state: whole blocks, and at least `max_rollback` stay out."""
    return (total - max_rollback).clamp(min=0) // BLOCK * BLOCK


def _advanced(memory: BlockMemory, log_decay: Tensor, seqlens: Tensor) -> Tensor:
    """The state after the first seqlens (S,) positions of the caches."""
    lengths = seqlens.tolist()
    longest = max(lengths)
    k, v = memory.k_cache[:, :longest], memory.v_cache[:, :longest]
    mask = None
    if min(lengths) != longest:
        mask = torch.arange(longest, device=seqlens.device) < seqlens[:, None]
    # only the state counts, so any q serves
    return padded_lightning_attention(k, k, v, log_decay, token_mask=mask, initial_state=memory.state)[1]


def _memory_of(state: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> BlockMemory:
    """A memory whose caches hold the positions of k and v (S, T, H, D) that `mask` (S, T) shows."""
    seqlens = mask.sum(1)
    width = max(int(seqlens.max()), BLOCK)
    sequence, position = mask.nonzero(as_tuple=True)
    place = (sequence, (mask.long().cumsum(1) - 1)[sequence, position])
    k_cache, v_cache = (
        x.new_zeros(len(x), width, *x.shape[2:]).index_put(place, x[sequence, position]) for x in (k, v)
    )
    return BlockMemory(state, k_cache, v_cache, seqlens)


def _positions_from(cache: Tensor, first: Tensor) -> Tensor:
    """One block of each sequence's positions from its own `first` (S,) on; zeros past the last."""
    S, R, _, _ = cache.shape
    index = first[:, None] + torch.arange(BLOCK, device=cache.device)  # (S, BLOCK)
    taken = cache[torch.arange(S, device=cache.device)[:, None], index.clamp(max=R - 1)]
    return taken.masked_fill((index >= R)[:, :, None, None], 0)
