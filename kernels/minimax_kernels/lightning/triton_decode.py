"""One token for every sequence, by replaying its open block with the forward's own tile.

Two launches. `replay_kernel` folds a full block into the state, then computes the new output; `append_kernel`
writes key, value and count down afterwards: all heads and column tiles of a sequence must have read them.
Nothing is read back to the host and no launch depends on data, so a step can be captured in a CUDA graph.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .memory import BLOCK, BlockMemory
from .triton_launch import launch
from .triton_tile import fold_block, padded, read_block, tile_for


def decode_triton(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, memory: BlockMemory) -> Tensor:
    """Shapes and rules as in `interface.lightning_decode`."""
    return decode_op(q, k, v, log_decay, *memory)


@torch.library.custom_op(
    "minimax_kernels::lightning_decode", mutates_args=("state", "k_cache", "v_cache", "seqlens")
)
def decode_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqlens: Tensor,
) -> Tensor:
    B, _, H, Dk = q.shape
    Dv = v.shape[3]
    out = torch.empty(B, 1, H, Dv, dtype=v.dtype, device=v.device)
    if not out.numel():
        seqlens.copy_(seqlens % BLOCK + 1)
        return out
    tile = tile_for(q.dtype, Dk, Dv)
    shared = dict(
        k_ptr=k,
        v_ptr=v,
        k_cache_ptr=k_cache,
        v_cache_ptr=v_cache,
        seqlens_ptr=seqlens,
        position_ptr=torch.empty_like(seqlens),
        H=H,
        Dk=Dk,
        Dv=Dv,
        k_strides=_without_time(k),
        v_strides=_without_time(v),
        k_cache_strides=k_cache.stride(),
        v_cache_strides=v_cache.stride(),
        seqlens_stride=seqlens.stride(0),
        BLOCK=BLOCK,
        BK=padded(Dk),
    )
    replay = dict(
        q_ptr=q,
        out_ptr=out,
        log_decay_ptr=log_decay.contiguous(),
        state_ptr=state,
        q_strides=_without_time(q),
        state_strides=state.stride(),
        C=tile.C,
        BV=tile.BV,
        num_warps=tile.warps,
        num_stages=1,
    )
    launch(replay_kernel, (B * H * triton.cdiv(Dv, tile.BV),), shared | replay)
    launch(append_kernel, (B * H,), shared | dict(BV=padded(Dv), num_warps=1))
    return out


@decode_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqlens: Tensor,
) -> Tensor:
    return v.new_empty(v.shape)


def _without_time(x: Tensor) -> tuple[int, int, int]:
    """Strides over batch, head and column of a (B, 1, H, D) tensor."""
    return x.stride(0), x.stride(2), x.stride(3)


@triton.jit
def replay_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    log_decay_ptr,
    state_ptr,
    k_cache_ptr,
    v_cache_ptr,
    seqlens_ptr,
    position_ptr,
    H,
    Dk,
    Dv,
    q_strides,
    k_strides,
    v_strides,
    k_cache_strides,
    v_cache_strides,
    state_strides,
    seqlens_stride,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One sequence, one head, BV columns of v: fold a full block, then compute the new token's tile."""
    columns = tl.cdiv(Dv, BV)
    program = tl.program_id(0)
    h = (program // columns % H).to(tl.int64)
    b = (program // columns // H).to(tl.int64)
    d = tl.arange(0, BK)
    e = program % columns * BV + tl.arange(0, BV)
    rate = tl.load(log_decay_ptr + h).to(tl.float32) * 1.4426950408889634
    count = tl.load(seqlens_ptr + b * seqlens_stride).to(tl.int32)
    position = count % BLOCK

    inside = (d[:, None] < Dk) & (e[None, :] < Dv)
    state_at = state_ptr + b * state_strides[0] + h * state_strides[1]
    state_at += d[:, None] * state_strides[2] + e[None, :] * state_strides[3]
    state = tl.load(state_at, mask=inside, other=0.0)
    k_cache_at = (
        k_cache_ptr + b * k_cache_strides[0] + h * k_cache_strides[2] + d[None, :] * k_cache_strides[3]
    )
    v_cache_at = (
        v_cache_ptr + b * v_cache_strides[0] + h * v_cache_strides[2] + e[None, :] * v_cache_strides[3]
    )
    for first in range(0, count - position, C):  # runs only when the block is full
        row = first + tl.arange(0, C)[:, None]
        k = tl.load(k_cache_at + row * k_cache_strides[1], mask=d[None, :] < Dk, other=0.0)
        v = tl.load(v_cache_at + row * v_cache_strides[1], mask=e[None, :] < Dv, other=0.0)
        state = fold_block(k, v, state, C, rate, False)
    if count == BLOCK:
        tl.store(state_at, state, mask=inside)

    q_new = tl.load(q_ptr + b * q_strides[0] + h * q_strides[1] + d * q_strides[2], mask=d < Dk, other=0.0)
    k_new = tl.load(k_ptr + b * k_strides[0] + h * k_strides[1] + d * k_strides[2], mask=d < Dk, other=0.0)
    v_new = tl.load(v_ptr + b * v_strides[0] + h * v_strides[1] + e * v_strides[2], mask=e < Dv, other=0.0)
    for first in range(0, position + 1, C):
        row = first + tl.arange(0, C)[:, None]
        k = tl.load(
            k_cache_at + row * k_cache_strides[1], mask=(row < position) & (d[None, :] < Dk), other=0.0
        )
        v = tl.load(
            v_cache_at + row * v_cache_strides[1], mask=(row < position) & (e[None, :] < Dv), other=0.0
        )
        new = row == position
        q = tl.where(new, q_new[None, :], tl.zeros_like(k))
        k = tl.where(new, k_new[None, :], k)
        v = tl.where(new, v_new[None, :], v)
        out = read_block(q, k, v, state, C, rate, False)
        out_at = out_ptr + (b * H + h) * Dv + e[None, :] + row * 0
        tl.store(out_at, out.to(v.dtype), mask=new & (e[None, :] < Dv))
        if C < BLOCK:
            state = fold_block(k, v, state, C, rate, False)
    if program % (H * columns) == 0:
        tl.store(position_ptr + b, position.to(tl.int64))


@triton.jit
def append_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    seqlens_ptr,
    position_ptr,
    H,
    Dk,
    Dv,
    k_strides,
    v_strides,
    k_cache_strides,
    v_cache_strides,
    seqlens_stride,
    BLOCK: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One sequence, one head: write the new k and v into the caches, and the new count."""
    h = (tl.program_id(0) % H).to(tl.int64)
    b = (tl.program_id(0) // H).to(tl.int64)
    position = tl.load(position_ptr + b)
    d = tl.arange(0, BK)
    e = tl.arange(0, BV)
    k = tl.load(k_ptr + b * k_strides[0] + h * k_strides[1] + d * k_strides[2], mask=d < Dk)
    v = tl.load(v_ptr + b * v_strides[0] + h * v_strides[1] + e * v_strides[2], mask=e < Dv)
    k_row = k_cache_ptr + b * k_cache_strides[0] + position * k_cache_strides[1] + h * k_cache_strides[2]
    v_row = v_cache_ptr + b * v_cache_strides[0] + position * v_cache_strides[1] + h * v_cache_strides[2]
    tl.store(k_row + d * k_cache_strides[3], k, mask=d < Dk)
    tl.store(v_row + e * v_cache_strides[3], v, mask=e < Dv)
    if h == 0:
        tl.store(seqlens_ptr + b * seqlens_stride, position + 1)
