"""How time is cut into segments, and the scan that gives every segment its first state.

    start[0] = state,    start[n+1] = exp(log_decay * positions[n]) start[n] + increment[n]

where increment[n] is what segment n adds to a state of zeros. Reverse, for gradients, begins with the last.
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
SEGMENT_LENGTHS = (4096, 2048, 1024)
ENOUGH = 264  # programs: two on each of the 132 SMs of an H100 or H200


@dataclass(frozen=True)
class Segments:
    """Positions [start, end) of every segment: of equal length, or neighbours in a packed sequence.

    count: segments in all.
    length: dense only, positions in a segment (the last of a sequence may be shorter).
    per_entry: dense only, segments in one batch entry.
    bounds: packed only, (count + 1,).
    first: packed and cut, (S + 1,) first segment of each sequence.
    """

    count: int
    length: int
    per_entry: int
    bounds: Tensor | None = None
    first: Tensor | None = None

    def new_states(self, k: Tensor, v: Tensor) -> Tensor:
        """A state (count, H, Dk, Dv) for every segment, of heads as in k and v, not yet written."""
        return torch.empty(self.count, k.shape[2], k.shape[3], v.shape[3], device=v.device)


def choose_segment_length(q: Tensor, v: Tensor, S: int) -> int:
    """Positions of a segment, or 0 for one pass, by shape alone.

    One pass where T is short, or where a program for each sequence, head and column tile fills the GPU; else
    the longest segment that makes programs enough.
    """
    _, T, H, Dk = q.shape
    columns = triton.cdiv(v.shape[3], tile_for(q.dtype, Dk, v.shape[3]).BV)
    programs = S * H * columns
    if not 0 < programs < ENOUGH or T < 4 * SEGMENT_LENGTHS[-1]:
        return 0
    lengths = (length for length in SEGMENT_LENGTHS if programs * (T // length) >= ENOUGH)
    return next(lengths, SEGMENT_LENGTHS[-1])


def partition(B: int, T: int, cu_seqlens: Tensor | None, segment_length: int) -> Segments:
    """Segments of a dense or packed call (length 0: whole sequences), reading no value from the GPU."""
    if cu_seqlens is None:
        per_entry = max(1, triton.cdiv(T, segment_length)) if segment_length else 1
        return Segments(count=B * per_entry, length=segment_length or T, per_entry=per_entry)
    S = len(cu_seqlens) - 1
    if not segment_length:
        return Segments(count=S, length=0, per_entry=1, bounds=cu_seqlens)
    bounds = cu_seqlens.to(torch.int64)
    counts = (bounds.diff() + segment_length - 1) // segment_length
    first = torch.nn.functional.pad(counts.cumsum(0), (1, 0))  # (S + 1,)
    # no packing has more; segments that are left over are empty
    count = T // segment_length + S
    segment = torch.arange(count + 1, device=bounds.device)
    owner = (torch.searchsorted(first, segment, right=True) - 1).clamp(max=S - 1)
    start = bounds[owner] + (segment - first[owner]) * segment_length
    return Segments(count, segment_length, 1, bounds=torch.minimum(start, bounds[owner + 1]), first=first)


def scan(
    increments: Tensor,
    log_decay: Tensor,
    segments: Segments,
    T: int,
    S: int,
    *,
    state: Tensor | None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """First states of the segments, from what each adds, and the final state of each sequence."""
    _, H, Dk, Dv = increments.shape
    segment_states = torch.empty_like(increments)
    final_state = torch.empty(S, H, Dk, Dv, device=increments.device)
    arguments = dict(
        increments_ptr=increments, segment_states_ptr=segment_states, log_decay_ptr=log_decay,
        state_ptr=state, final_state_ptr=final_state, bounds_ptr=segments.bounds, first_ptr=segments.first,
        T=T, H=H, size=Dk * Dv, length=segments.length, per_entry=segments.per_entry,
        ENTRIES=512, REVERSE=reverse, num_warps=4,
    )  # fmt: skip
    launch(scan_kernel, (S * H * triton.cdiv(Dk * Dv, 512),), arguments)
    return segment_states, final_state


@triton.jit
def find_segment(bounds_ptr, segment, T, length, per_entry):
    """Batch entry, first position and number of positions of a segment."""
    if bounds_ptr is None:
        b = segment // per_entry
        start = segment % per_entry * length
        end = tl.minimum(start + length, T)
    else:
        b = segment * 0
        start = tl.load(bounds_ptr + segment).to(tl.int64)
        end = tl.load(bounds_ptr + segment + 1).to(tl.int64)
    return b, start, (end - start).to(tl.int32)


@triton.jit(do_not_specialize=["T", "H", "length", "per_entry"])
def scan_kernel(
    increments_ptr,
    segment_states_ptr,
    log_decay_ptr,
    state_ptr,
    final_state_ptr,
    bounds_ptr,
    first_ptr,
    T,
    H,
    size,
    length,
    per_entry,
    ENTRIES: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """ENTRIES entries of one sequence's state: walk over its segments, keep the state before each."""
    tiles = tl.cdiv(size, ENTRIES)
    program = tl.program_id(0)
    entry = program % tiles * ENTRIES + tl.arange(0, ENTRIES)
    h = program // tiles % H
    s = (program // tiles // H).to(tl.int64)
    inside = entry < size
    if first_ptr is None:
        first = s * per_entry
        count = per_entry
    else:
        first = tl.load(first_ptr + s)
        count = (tl.load(first_ptr + s + 1) - first).to(tl.int32)
    rate = tl.load(log_decay_ptr + h).to(tl.float32) * 1.4426950408889634
    state = tl.zeros((ENTRIES,), tl.float32)
    if state_ptr is not None:
        state = tl.load(state_ptr + (s * H + h) * size + entry, mask=inside, other=0.0)
    for n in range(count):
        segment = first + (count - 1 - n if REVERSE else n)
        _, _, positions = find_segment(bounds_ptr, segment, T, length, per_entry)
        offset = (segment * H + h) * size + entry
        increment = tl.load(increments_ptr + offset, mask=inside, other=0.0)
        tl.store(segment_states_ptr + offset, state, mask=inside)
        state = state * tl.exp2(rate * positions) + increment
    tl.store(final_state_ptr + (s * H + h) * size + entry, state, mask=inside)
