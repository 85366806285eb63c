"""Sequences of different length laid end to end, and back.

A packed tensor is (1, N, ...) with bounds `cu_seqlens` (S + 1,): sequence s is tokens cu_seqlens[s] to
cu_seqlens[s + 1]. Tokens past the last bound belong to no sequence.
"""

import torch
from torch import Tensor

from .backends import can_check_values


def cu_seqlens_from_lengths(lengths: Tensor) -> Tensor:
    """Bounds (S + 1,) int32 of sequences with the given lengths (S,)."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def pack(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Lay the tokens of a padded batch end to end.

    Args:
        x: (B, T, ...).
        mask: (B, T), nonzero at tokens, wherever the padding lies.

    Returns:
        packed (1, N, ...) and its bounds (B + 1,) int32; a sequence that is all padding becomes an empty one.
    """
    if mask.shape != x.shape[:2]:
        raise ValueError(f"mask must have the batch's shape {tuple(x.shape[:2])}, got {tuple(mask.shape)}")
    mask = mask.bool()
    return x[mask][None], cu_seqlens_from_lengths(mask.sum(-1))


def unpack(packed: Tensor, mask: Tensor) -> Tensor:
    """Put packed tokens (1, N, ...) back where `mask` (B, T) has them; zeros elsewhere."""
    mask = mask.bool()
    out = packed.new_zeros(*mask.shape, *packed.shape[2:])
    out[mask] = packed[0]
    return out


def check_cu_seqlens(cu_seqlens: Tensor, *, batch: int, positions: int) -> None:
    """Raise a ValueError unless `cu_seqlens` bounds sequences within `positions`."""
    if batch != 1:
        raise ValueError(
            f"packed input needs B = 1, got B = {batch}; flatten it with minimax_kernels.packing.pack()"
        )
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "cu_seqlens must be a vector of S + 1 int32 or int64 bounds, got "
            f"shape {tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}"
        )
    if not can_check_values(cu_seqlens):
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {bounds[0]}")
    for left, right in zip(bounds, bounds[1:], strict=False):
        if right < left:
            raise ValueError(f"cu_seqlens must never decrease, got {left} before {right}")
    if bounds[-1] > positions:
        raise ValueError(f"cu_seqlens must end at T = {positions} or before, got {bounds[-1]}")
