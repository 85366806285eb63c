"""How time is cut into pieces, and the scan that gives every piece its first state.

    start[0] = state,    start[n+1] = exp(log_decay * rows[n]) start[n] + gain[n]

where gain[n] is what piece n adds to a state of zeros. Reverse, for gradients, starts at the last piece.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_launch import launch
from .triton_tile import tile_for

# Positions of a segment. Moving its states costs 64 of 1,600 bytes a token at 4,096, four times that at 1,024
# (D = 128, 16 bits); nothing was timed.
SEGMENTS = (4096, 2048, 1024)
ENOUGH = 264  # programs: two on each of the 132 SMs of an H100 or H200


@dataclass(frozen=True)
class Pieces:
    """Rows [start, end) of every piece: segments of equal length, or neighbours in a packed row."""

    count: int
    length: int  # dense: positions in a piece (the last of a row may be shorter)
    per_row: int  # dense: pieces in one batch row
    bounds: Tensor | None = None  # packed: (count + 1,)
    first: Tensor | None = None  # packed segments: (S + 1,) first piece of each sequence

    def new_states(self, k: Tensor, v: Tensor) -> Tensor:
        """A state (count, H, Dk, Dv) for every piece, of heads as in k and v, not yet written."""
        return torch.empty(self.count, k.shape[2], k.shape[3], v.shape[3], device=v.device)


def segment_length(q: Tensor, v: Tensor, S: int) -> int:
    """Positions of a segment, or 0 for one pass, by shape alone.

    One pass where T is short, or where a program for each sequence, head and column tile fills the GPU; else
    the longest segment that makes programs enough.
    """
    _, T, H, Dk = q.shape
    columns = triton.cdiv(v.shape[3], tile_for(q.dtype, Dk, v.shape[3]).BV)
    programs = S * H * columns
    if not 0 < programs < ENOUGH or T < 4 * SEGMENTS[-1]:
        return 0
    return next((length for length in SEGMENTS if programs * (T // length) >= ENOUGH), SEGMENTS[-1])


def cut(B: int, T: int, cu_seqlens: Tensor | None, segment: int) -> Pieces:
    """Pieces of a dense or packed call (segment 0: whole sequences), without reading a value from the GPU."""
    if cu_seqlens is None:
        per_row = max(1, triton.cdiv(T, segment)) if segment else 1
        return Pieces(count=B * per_row, length=segment or T, per_row=per_row)
    S = len(cu_seqlens) - 1
    if not segment:
        return Pieces(count=S, length=0, per_row=1, bounds=cu_seqlens)
    bounds = cu_seqlens.to(torch.int64)
    first = torch.nn.functional.pad(((bounds.diff() + segment - 1) // segment).cumsum(0), (1, 0))  # (S + 1,)
    count = T // segment + S  # no packing has more; pieces that are left over are empty
    piece = torch.arange(count + 1, device=bounds.device)
    owner = (torch.searchsorted(first, piece, right=True) - 1).clamp(max=S - 1)
    start = bounds[owner] + (piece - first[owner]) * segment
    return Pieces(count, segment, 1, bounds=torch.minimum(start, bounds[owner + 1]), first=first)


def scan(
    gain: Tensor,
    log_decay: Tensor,
    pieces: Pieces,
    T: int,
    S: int,
    *,
    state: Tensor | None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """First states of the pieces, from what each adds, and the last state of each sequence."""
    _, H, Dk, Dv = gain.shape
    starts = torch.empty_like(gain)
    last = torch.empty(S, H, Dk, Dv, device=gain.device)
    arguments = dict(
        gain_ptr=gain, starts_ptr=starts, log_decay_ptr=log_decay, state_ptr=state, last_ptr=last,
        bounds_ptr=pieces.bounds, first_ptr=pieces.first, T=T, H=H, size=Dk * Dv, length=pieces.length,
        per_row=pieces.per_row, ENTRIES=512, REVERSE=reverse, num_warps=4,
    )  # fmt: skip
    launch(scan_kernel, (S * H * triton.cdiv(Dk * Dv, 512),), arguments)
    return starts, last


@triton.jit
def find_piece(bounds_ptr, piece, T, length, per_row):
    """Batch row, first position and number of rows of a piece."""
    if bounds_ptr is None:
        b = piece // per_row
        start = piece % per_row * length
        end = tl.minimum(start + length, T)
    else:
        b = piece * 0
        start = tl.load(bounds_ptr + piece).to(tl.int64)
        end = tl.load(bounds_ptr + piece + 1).to(tl.int64)
    return b, start, (end - start).to(tl.int32)


@triton.jit(do_not_specialize=["T", "H", "length", "per_row"])
def scan_kernel(
    gain_ptr,
    starts_ptr,
    log_decay_ptr,
    state_ptr,
    last_ptr,
    bounds_ptr,
    first_ptr,
    T,
    H,
    size,
    length,
    per_row,
    ENTRIES: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """ENTRIES entries of one sequence's state: walk over its pieces, keep the state before each."""
    tiles = tl.cdiv(size, ENTRIES)
    program = tl.program_id(0)
    entry = program % tiles * ENTRIES + tl.arange(0, ENTRIES)
    h = program // tiles % H
    s = (program // tiles // H).to(tl.int64)
    inside = entry < size
    if first_ptr is None:
        first = s * per_row
        count = per_row
    else:
        first = tl.load(first_ptr + s)
        count = (tl.load(first_ptr + s + 1) - first).to(tl.int32)
    rate = tl.load(log_decay_ptr + h).to(tl.float32) * 1.4426950408889634
    state = tl.zeros((ENTRIES,), tl.float32)
    if state_ptr is not None:
        state = tl.load(state_ptr + (s * H + h) * size + entry, mask=inside, other=0.0)
    for n in range(count):
        piece = first + (count - 1 - n if REVERSE else n)
        _, _, rows = find_piece(bounds_ptr, piece, T, length, per_row)
        offset = (piece * H + h) * size + entry
        gain = tl.load(gain_ptr + offset, mask=inside, other=0.0)
        tl.store(starts_ptr + offset, state, mask=inside)
        state = state * tl.exp2(rate * rows) + gain
    tl.store(last_ptr + (s * H + h) * size + entry, state, mask=inside)
