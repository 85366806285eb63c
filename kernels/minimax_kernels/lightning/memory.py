"""What one lightning layer remembers of its sequences between two calls: a plain value, no computation.

A sequence is cut into blocks of 64 positions, counted from its own first token. Its memory is the state at a
block boundary, and the keys and values since. With 150 tokens seen:

    tokens   0 ........ 63 | 64 ....... 127 | 128 ... 149
    memory                           state ^ | 22 keys and values

`extend.py` adds positions to it, `interface.lightning_decode` a single one.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import accumulation_dtype

# Positions in a block. Forward, replay and cache must agree on this one number.
BLOCK = 64


class BlockMemory(NamedTuple):
    """The memory of S sequences, each at its own position.

    state: (S, H, Dk, Dv) float32 (float64 for float64 inputs), after the blocks that are folded.
    k_cache, v_cache: (S, R, H, Dk) and (S, R, H, Dv), R >= 64: the positions after those blocks.
    cache_seqlens: (S,) int64, how many of the R positions each sequence has filled.
    """

    state: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor

    @classmethod
    def empty(cls, k: Tensor, v: Tensor) -> "BlockMemory":
        """Nothing seen yet, for the sequences, heads and types of k (S, T, H, Dk) and v (S, T, H, Dv)."""
        S, _, H, Dk = k.shape
        return cls(
            k.new_zeros(S, H, Dk, v.shape[-1], dtype=accumulation_dtype(k)),
            k.new_zeros(S, BLOCK, H, Dk),
            v.new_zeros(S, BLOCK, H, v.shape[-1]),
            torch.zeros(S, dtype=torch.int64, device=k.device),
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> "BlockMemory":
        """The same change of the first dimension (selecting, repeating) in every tensor."""
        return BlockMemory(*(change(x) for x in self))

    def is_one_block(self) -> bool:
        """Whether the caches have room for one block only, as `lightning_decode` leaves them."""
        return self.k_cache.shape[1] == BLOCK
