"""Lightning attention in Triton: one kernel sweeps the tile over time; a call is one such sweep or two.

A sweep takes a piece of a sequence from one state to the next and writes the rows between. Where sequences
and heads make programs enough, a piece is a whole sequence. Otherwise it is a segment: a first sweep finds
what each segment adds to the state, a scan turns that into first states, a second sweep writes the rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_launch import launch
from .triton_segments import Pieces, cut, find_piece, scan
from .triton_tile import Tile, fold_block, padded, read_block, tile_for


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    segment: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, the last state, and the first states of segments (None in one pass).

    Shapes as in `interface.lightning_attention`; `segment` is what `segment_length` says, 0 for one pass.
    """
    B, T, H, Dk = q.shape
    S = B if cu_seqlens is None else len(cu_seqlens) - 1
    pieces = cut(B, T, cu_seqlens, segment)
    out = v.new_empty(v.shape)
    if not segment:
        last = pieces.new_states(k, v)
        sweep(q, k, v, log_decay, pieces, state=state, out=out, last=last)
        return out, last, None
    gain = pieces.new_states(k, v)
    sweep(None, k, v, log_decay, pieces, last=gain)
    starts, last = scan(gain, log_decay, pieces, T, S, state=state)
    sweep(q, k, v, log_decay, pieces, state=starts, out=out)
    return out, last, starts


def sweep(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    pieces: Pieces,
    *,
    state: Tensor | None = None,
    out: Tensor | None = None,
    last: Tensor | None = None,
    reverse: bool = False,
    transposed: bool = False,
    tile: Tile | None = None,
) -> None:
    """Write the outputs of q into `out` (B, T, H, Dv), and the state after every piece into `last`.

    q and `out` are given together; what is not given is not computed.

    `state` holds a matrix (Dk, Dv) for every piece and head, (Dv, Dk) if `transposed`.
    """
    q = None if q is None else tma_compatible(q)
    k, v = tma_compatible(k), tma_compatible(v)
    _, T, H, Dk = k.shape
    Dv = v.shape[3]
    tile = tile or tile_for(k.dtype, Dk, Dv)
    programs = pieces.count * H * triton.cdiv(Dv, tile.BV)
    if programs:
        arguments = dict(
            q_ptr=q, k_ptr=k, v_ptr=v, out_ptr=out, log_decay_ptr=log_decay, state_ptr=state, last_ptr=last,
            bounds_ptr=pieces.bounds, T=T, H=H, Dk=Dk, Dv=Dv, length=pieces.length, per_row=pieces.per_row,
            q_strides=_outer(q), k_strides=_outer(k), v_strides=_outer(v), out_strides=_outer(out),
            C=tile.C, BK=padded(Dk), BV=tile.BV, REVERSE=reverse, TRANSPOSED=transposed,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        launch(sweep_kernel, (programs,), arguments)
    if out is not None and pieces.bounds is not None:
        clear_tail(out, pieces.bounds)


def clear_tail(out: Tensor, bounds: Tensor) -> None:
    """Zero the rows that no sequence holds."""
    _, T, H, D = out.shape
    arguments = dict(
        out_ptr=out, bounds_ptr=bounds, pieces=len(bounds) - 1, T=T, row=H * D, ROWS=64, COLUMNS=256,
        num_warps=4,
    )  # fmt: skip
    launch(clear_tail_kernel, (triton.cdiv(T, 64),), arguments)


def tma_compatible(x: Tensor) -> Tensor:
    """x itself where a tensor descriptor can address it, else a copy: 16-byte rows, adjacent columns."""
    aligned = all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:3])
    if x.stride(3) == 1 and aligned and x.stride(1) >= x.shape[3] and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _outer(x: Tensor | None) -> tuple[int, int, int]:
    """Strides over batch, time and head."""
    return (0, 0, 0) if x is None else (x.stride(0), x.stride(1), x.stride(2))


@triton.jit(do_not_specialize=["T", "H", "length", "per_row"])
def sweep_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    log_decay_ptr,
    state_ptr,
    last_ptr,
    bounds_ptr,
    T,
    H,
    Dk,
    Dv,
    length,
    per_row,
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
    """One piece, one head, BV columns of v: carry the state through the piece's blocks, write their rows."""
    columns = tl.cdiv(Dv, BV)
    program = tl.program_id(0)
    column = program % columns * BV
    h = program // columns % H
    piece = (program // columns // H).to(tl.int64)
    b, start, rows = find_piece(bounds_ptr, piece, T, length, per_row)
    rate = tl.load(log_decay_ptr + h).to(tl.float32) * 1.4426950408889634

    # Descriptors end with the piece: rows past it are read as zeros and never written.
    k_map = map_rows(k_ptr, k_strides, b, start, h, rows, Dk, C, BK)
    v_map = map_rows(v_ptr, v_strides, b, start, h, rows, Dv, C, BV)
    if out_ptr is not None:
        q_map = map_rows(q_ptr, q_strides, b, start, h, rows, Dk, C, BK)
        out_map = map_rows(out_ptr, out_strides, b, start, h, rows, Dv, C, BV)
    matrix = (piece * H + h) * Dk * Dv
    state = tl.zeros((BK, BV), tl.float32)
    if state_ptr is not None:
        if TRANSPOSED:
            state = tl.trans(map_matrix(state_ptr + matrix, Dv, Dk, BV, BK).load([column, 0]))
        else:
            state = map_matrix(state_ptr + matrix, Dk, Dv, BK, BV).load([0, column])

    blocks = tl.cdiv(rows, C)
    for n in range(blocks):
        first = (blocks - 1 - n if REVERSE else n) * C
        held = tl.minimum(rows - first, C)
        k = k_map.load([first, 0])
        v = v_map.load([first, column])
        if out_ptr is not None:
            q = q_map.load([first, 0])
            out = read_block(q, k, v, state, held, rate, REVERSE)
            out_map.store([first, column], out.to(v.dtype))
        state = fold_block(k, v, state, held, rate, REVERSE)
    if last_ptr is not None:
        map_matrix(last_ptr + matrix, Dk, Dv, BK, BV).store([0, column], state)


@triton.jit
def map_rows(ptr, strides, b, start, h, rows, D, C: tl.constexpr, BD: tl.constexpr):
    """Descriptor of the rows of one piece and head, (rows, D) in tiles of (C, BD)."""
    base = ptr + b * strides[0] + start * strides[1] + h.to(tl.int64) * strides[2]
    rows = tl.maximum(rows, 1)  # an empty piece reads nothing, but a descriptor of nothing is not allowed
    return tl.make_tensor_descriptor(base, [rows, D], [strides[1], 1], [C, BD])


@triton.jit
def map_matrix(ptr, rows, columns, BR: tl.constexpr, BC: tl.constexpr):
    return tl.make_tensor_descriptor(ptr, [rows, columns], [columns, 1], [BR, BC])


@triton.jit(do_not_specialize=["pieces", "T"])
def clear_tail_kernel(out_ptr, bounds_ptr, pieces, T, row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    end = tl.load(bounds_ptr + pieces).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if tl.max(t, 0) >= end:
        for first in range(0, row, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            inside = (t[:, None] >= end) & (t[:, None] < T) & (column[None, :] < row)
            zeros = tl.zeros((ROWS, COLUMNS), out_ptr.dtype.element_ty)
            tl.store(out_ptr + t[:, None] * row + column[None, :], zeros, mask=inside)
