"""Lightning attention in Triton: one kernel sweeps the tile over time; a call is one such sweep or two.

A sweep takes a segment from one state to the next and writes the outputs between. Where sequences and heads
make programs enough, a segment is a whole sequence. Otherwise sequences are cut: a first sweep finds what
each segment adds to the state, a scan turns that into first states, a second sweep writes the outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_launch import launch
from .triton_segments import Segments, find_segment, partition, scan
from .triton_tile import Tile, fold_block, padded, read_block, tile_for


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    segment_length: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, the final state, and the first states of segments (None in one pass).

    Shapes as in `interface.lightning_attention`; `segment_length` as `choose_segment_length` gives it, 0 for
    one pass.
    """
    B, T, H, Dk = q.shape
    S = B if cu_seqlens is None else len(cu_seqlens) - 1
    segments = partition(B, T, cu_seqlens, segment_length)
    out = v.new_empty(v.shape)
    if not segment_length:
        final_state = segments.new_states(k, v)
        sweep(q, k, v, log_decay, segments, state=state, out=out, final_state=final_state)
        return out, final_state, None
    increments = segments.new_states(k, v)
    sweep(None, k, v, log_decay, segments, final_state=increments)
    segment_states, final_state = scan(increments, log_decay, segments, T, S, state=state)
    sweep(q, k, v, log_decay, segments, state=segment_states, out=out)
    return out, final_state, segment_states


def sweep(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    segments: Segments,
    *,
    state: Tensor | None = None,
    out: Tensor | None = None,
    final_state: Tensor | None = None,
    reverse: bool = False,
    transposed: bool = False,
    tile: Tile | None = None,
) -> None:
    """Write the outputs of q into `out` (B, T, H, Dv), and the state after every segment into `final_state`.

    q and `out` are given together; what is not given is not computed.

    `state` holds a matrix (Dk, Dv) for every segment and head, (Dv, Dk) if `transposed`.
    """
    q = None if q is None else tma_compatible(q)
    k, v = tma_compatible(k), tma_compatible(v)
    _, T, H, Dk = k.shape
    Dv = v.shape[3]
    tile = tile or tile_for(k.dtype, Dk, Dv)
    programs = segments.count * H * triton.cdiv(Dv, tile.BV)
    if programs:
        arguments = dict(
            q_ptr=q, k_ptr=k, v_ptr=v, out_ptr=out, log_decay_ptr=log_decay, state_ptr=state,
            final_state_ptr=final_state, bounds_ptr=segments.bounds, T=T, H=H, Dk=Dk, Dv=Dv,
            length=segments.length, per_entry=segments.per_entry,
            q_strides=_outer(q), k_strides=_outer(k), v_strides=_outer(v), out_strides=_outer(out),
            C=tile.C, BK=padded(Dk), BV=tile.BV, REVERSE=reverse, TRANSPOSED=transposed,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        launch(sweep_kernel, (programs,), arguments)
    if out is not None and segments.bounds is not None:
        clear_tail(out, segments.bounds)


def clear_tail(out: Tensor, bounds: Tensor) -> None:
    """Zero the positions that belong to no sequence."""
    _, T, H, D = out.shape
    arguments = dict(
        out_ptr=out, bounds_ptr=bounds, segments=len(bounds) - 1, T=T, width=H * D, POSITIONS=64, COLUMNS=256,
        num_warps=4,
    )  # fmt: skip
    launch(clear_tail_kernel, (triton.cdiv(T, 64),), arguments)


def tma_compatible(x: Tensor) -> Tensor:
    """x itself where a tensor descriptor can address it, else a copy: 16-byte vectors, adjacent entries."""
    aligned = all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:3])
    if x.stride(3) == 1 and aligned and x.stride(1) >= x.shape[3] and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _outer(x: Tensor | None) -> tuple[int, int, int]:
    """Strides over batch, time and head."""
    return (0, 0, 0) if x is None else (x.stride(0), x.stride(1), x.stride(2))


@triton.jit(do_not_specialize=["T", "H", "length", "per_entry"])
def sweep_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    log_decay_ptr,
    state_ptr,
    final_state_ptr,
    bounds_ptr,
    T,
    H,
    Dk,
    Dv,
    length,
    per_entry,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    REVERSE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """One segment, one head, BV columns of v: carry the state through its blocks, write their outputs."""
    columns = tl.cdiv(Dv, BV)
    program = tl.program_id(0)
    column = program % columns * BV
    h = program // columns % H
    segment = (program // columns // H).to(tl.int64)
    b, start, positions = find_segment(bounds_ptr, segment, T, length, per_entry)
    rate = tl.load(log_decay_ptr + h).to(tl.float32) * 1.4426950408889634

    # Descriptors end with the segment: positions past it are read as zeros and never written.
    k_map = map_positions(k_ptr, k_strides, b, start, h, positions, Dk, C, BK)
    v_map = map_positions(v_ptr, v_strides, b, start, h, positions, Dv, C, BV)
    if out_ptr is not None:
        q_map = map_positions(q_ptr, q_strides, b, start, h, positions, Dk, C, BK)
        out_map = map_positions(out_ptr, out_strides, b, start, h, positions, Dv, C, BV)
    matrix = (segment * H + h) * Dk * Dv
    state = tl.zeros((BK, BV), tl.float32)
    if state_ptr is not None:
        if TRANSPOSED:
            state = tl.trans(map_matrix(state_ptr + matrix, Dv, Dk, BV, BK).load([column, 0]))
        else:
            state = map_matrix(state_ptr + matrix, Dk, Dv, BK, BV).load([0, column])

    blocks = tl.cdiv(positions, C)
    for n in range(blocks):
        first = (blocks - 1 - n if REVERSE else n) * C
        filled = tl.minimum(positions - first, C)
        k = k_map.load([first, 0])
        v = v_map.load([first, column])
        if out_ptr is not None:
            q = q_map.load([first, 0])
            out = read_block(q, k, v, state, filled, rate, REVERSE)
            out_map.store([first, column], out.to(v.dtype))
        state = fold_block(k, v, state, filled, rate, REVERSE)
    if final_state_ptr is not None:
        map_matrix(final_state_ptr + matrix, Dk, Dv, BK, BV).store([0, column], state)


@triton.jit
def map_positions(ptr, strides, b, start, h, positions, D, C: tl.constexpr, BD: tl.constexpr):
    """Descriptor of one segment and head, (positions, D) in tiles of (C, BD)."""
    base = ptr + b * strides[0] + start * strides[1] + h.to(tl.int64) * strides[2]
    # an empty segment reads nothing, but a descriptor of nothing is not allowed
    positions = tl.maximum(positions, 1)
    return tl.make_tensor_descriptor(base, [positions, D], [strides[1], 1], [C, BD])


@triton.jit
def map_matrix(ptr, height, columns, BR: tl.constexpr, BC: tl.constexpr):
    return tl.make_tensor_descriptor(ptr, [height, columns], [columns, 1], [BR, BC])


@triton.jit(do_not_specialize=["segments", "T"])
def clear_tail_kernel(
    out_ptr, bounds_ptr, segments, T, width, POSITIONS: tl.constexpr, COLUMNS: tl.constexpr
):
    end = tl.load(bounds_ptr + segments).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * POSITIONS + tl.arange(0, POSITIONS)
    if tl.max(t, 0) >= end:
        for first in range(0, width, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            inside = (t[:, None] >= end) & (t[:, None] < T) & (column[None, :] < width)
            zeros = tl.zeros((POSITIONS, COLUMNS), out_ptr.dtype.element_ty)
            tl.store(out_ptr + t[:, None] * width + column[None, :], zeros, mask=inside)
