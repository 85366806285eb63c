"""The tile: what one block of C positions reads from the memory and leaves in it. All kernels build on it.

With rate = log2(e) * log_decay, the state before the block and n positions filled (README.md derives it):

    read:  out[i] = 2^(rate (i+1)) q[i] @ state + sum_{j <= i} 2^(rate (i-j)) (q[i] . k[j]) v[j]
    fold:  state  = 2^(rate n) state + sum_j 2^(rate (n-1-j)) outer(k[j], v[j])

REVERSE runs the same sums backwards in time, as gradients of k and v need them: j >= i, and the weights of
reading and folding change places. Positions past n are zeros. No exponent that counts is above 0, so any
decay is safe. Products take operands of the input's type and add in float32; the state stays float32.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from .memory import BLOCK


@dataclass(frozen=True)
class Tile:
    """How a kernel is cut for one type and width; `scripts/compile_kernels.py` shows what becomes of it."""

    C: int  # positions in a tile; divides BLOCK
    BV: int  # columns of v and state that one program keeps
    warps: int
    stages: int  # depth of the load pipeline


# 16-bit: 64 positions fill one wgmma; wider tiles or a third stage spill registers, or leave one program
# per SM.
HALF = {128: Tile(C=64, BV=64, warps=4, stages=2), 256: Tile(C=64, BV=32, warps=4, stages=2)}
# float32 runs on FMA units: short tiles, so that operands of `product` fit into registers.
FLOAT = {128: Tile(C=16, BV=32, warps=8, stages=2), 256: Tile(C=16, BV=16, warps=8, stages=2)}
assert all(BLOCK % tile.C == 0 for tile in (*HALF.values(), *FLOAT.values()))


def padded(width: int) -> int:
    """Columns of the tile that holds `width`: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(width))


def tile_for(dtype: torch.dtype, Dk: int, Dv: int) -> Tile:
    """The one tile of this type and these widths."""
    if max(Dk, Dv) > 256:
        raise ValueError(
            f"backend 'triton' takes heads of at most 256, got {Dk} and {Dv}; use backend='chunked'"
        )
    table = FLOAT if dtype == torch.float32 else HALF
    tile = table[128 if Dk <= 128 else 256]
    return replace(tile, BV=min(tile.BV, padded(Dv)))


@triton.jit
def read_block(q, k, v, state, n, rate, REVERSE: tl.constexpr):
    """Outputs (C, BV) of one block, float32."""
    C: tl.constexpr = q.shape[0]
    i = tl.arange(0, C).to(tl.float32)  # as integers they cost registers
    steps = tl.maximum(n - 1 - i, 0) if REVERSE else i + 1
    distance = i[None, :] - i[:, None] if REVERSE else i[:, None] - i[None, :]
    # The memory's share comes first: with the scores first, registers spill.
    out = read_state(q, state) * tl.exp2(rate * steps)[:, None]
    weight = tl.where(distance >= 0, tl.exp2(rate * distance), 0.0)
    scores = product(q, tl.trans(k), tl.zeros((C, C), tl.float32)) * weight
    return product(scores.to(v.dtype), v, out)


@triton.jit
def read_state(q, state):
    """q @ state; to 16-bit operands the float32 state comes in two parts, its rounding and what is left."""
    out = tl.zeros((q.shape[0], state.shape[1]), tl.float32)
    if q.dtype == tl.float32:
        return product(q, state, out)
    high = state.to(q.dtype)
    low = (state - high.to(tl.float32)).to(q.dtype)
    return product(q, low, product(q, high, out))


@triton.jit
def fold_block(k, v, state, n, rate, REVERSE: tl.constexpr):
    """The state (BK, BV) after one block of which n are filled."""
    i = tl.arange(0, k.shape[0]).to(tl.float32)
    steps = i + 1 if REVERSE else tl.maximum(n - 1 - i, 0)
    faded = v.to(tl.float32) * tl.exp2(rate * steps)[:, None]
    return product(tl.trans(k), faded.to(k.dtype), state * tl.exp2(rate * n))


@triton.jit
def product(a, b, total):
    """total + a @ b: 16-bit types on tensor cores, float32 exactly (IEEE) by slices that fit in registers."""
    M: tl.constexpr = a.shape[0]
    K: tl.constexpr = a.shape[1]
    N: tl.constexpr = b.shape[1]
    if a.dtype != tl.float32 or K == 16:
        return tl.dot(a, b, acc=total, input_precision="ieee")
    a = tl.permute(tl.reshape(a, (M, K // 16, 16)), (1, 0, 2))
    b = tl.reshape(b, (K // 16, 16, N))
    return total + tl.sum(tl.dot(a, b, input_precision="ieee"), axis=0)
