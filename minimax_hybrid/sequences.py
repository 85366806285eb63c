"""Where the sequences of one call lie: which positions hold tokens, and where packed documents begin.

A mask that contains zeros means padding. Position ids that restart mean packed documents, but only without
such a mask: the padded sequences of `generate` restart too, where the padding ends. Both become the
operator's `cu_seqlens`, here and nowhere else.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from minimax_kernels import IGNORED
from minimax_kernels.backends import can_check_values, tracing


@dataclass(frozen=True)
class SequenceMetadata:
    """The positions of one call, T new ones after `past` cached ones.

    token_mask: (B, T) bool, which new positions hold a token; None if all do.
    full_token_mask: (B, past + T) bool, the same with the cached positions in front; None if all do.
    cu_seqlens: (S + 1,) int32 bounds of packed documents in the flattened (B * T); None if not packed.
    position_ids: (B, T), from 0 at the first token of each document.
    """

    position_ids: Tensor
    token_mask: Tensor | None = None
    full_token_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def previous(self) -> Tensor:
        """(B, T), the column of the token before each token in its own document, wherever padding lies; -1
        where there is none, and at padding."""
        B, T = self.position_ids.shape
        column = torch.arange(T, device=self.position_ids.device).expand(B, T)
        if self.token_mask is not None:
            last = torch.where(self.token_mask, column, -1).cummax(-1).values
            before = torch.nn.functional.pad(last[:, :-1], (1, 0), value=-1)
            return torch.where(self.token_mask, before, -1)
        before = column - 1
        if self.cu_seqlens is not None:
            before = before.flatten().index_fill(0, self.cu_seqlens[:-1].long(), -1).view(B, T)
        return before

    def next_tokens(self, tokens: Tensor) -> Tensor:
        """(B, T): at each position which of `tokens` (B, T) is predicted from it, -100 where none is."""
        previous = self.previous
        # column 0 takes what has no predecessor
        shifted = tokens.new_full((tokens.shape[0], tokens.shape[1] + 1), IGNORED)
        shifted.scatter_(1, previous + 1, torch.where(previous >= 0, tokens, IGNORED))
        return shifted[:, 1:].contiguous()

    @cached_property
    def last_document(self) -> Tensor:
        """(B, T) bool, the positions of the packed document that ends each batch entry."""
        B, T = self.position_ids.shape
        index = torch.arange(B * T, device=self.position_ids.device).view(B, T)
        if self.cu_seqlens is None:
            raise ValueError("these sequences are not packed, so they have no last document")
        starts = self.cu_seqlens[:-1].long()
        last = starts[torch.searchsorted(starts, index[:, -1].contiguous(), right=True) - 1]  # (B,)
        return index >= last[:, None]

    def cached_token_mask(self) -> Tensor | None:
        """(B, cached) bool for the cache after this call; of packed documents only the last continues."""
        if self.cu_seqlens is None:
            return self.full_token_mask
        return None if bool(self.last_document.all()) else self.last_document

    def to(self, device: torch.device) -> "SequenceMetadata":
        """The same on another device, for a layer that lies there."""
        if self.position_ids.device == device:
            return self
        moved = (
            x if x is None else x.to(device) for x in (self.token_mask, self.full_token_mask, self.cu_seqlens)
        )
        return SequenceMetadata(self.position_ids.to(device), *moved)


def find_sequences(
    B: int,
    T: int,
    *,
    device: torch.device,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past: int = 0,
    past_mask: Tensor | None = None,
) -> SequenceMetadata:
    """The sequences that the caller's mask (B, past + T) and position ids (B or 1, T) describe.

    Args:
        past, past_mask: how many positions are cached, and their mask (B, past) if it hides padding.

    Raises:
        ValueError: a mask or position ids that do not fit the input, the cache or each other.
    """
    full_mask = _full_mask(B, past, T, attention_mask, past_mask)
    if full_mask is None and position_ids is None:
        return SequenceMetadata(_positions(B, past, T, None, None, device))
    if full_mask is not None and tracing():
        # in a trace a mask is kept as it is: whether it hides anything, or fits the positions, is a value
        position_ids = _positions(B, past, T, position_ids, full_mask, device)
        return SequenceMetadata(position_ids, full_mask[:, past:], full_mask)
    position_ids = _positions(B, past, T, position_ids, full_mask, device)
    starts = position_ids[:, 1:] != position_ids[:, :-1] + 1  # (B, T - 1)
    if full_mask is not None:
        token_mask = full_mask[:, past:]
        # of two tokens with padding between them, too, the second comes later in the same sequence
        highest = torch.where(token_mask, position_ids, -1).cummax(-1).values
        restarts = starts & token_mask[:, :-1] | (position_ids[:, 1:] <= highest[:, :-1])
        if bool((restarts & token_mask[:, 1:]).any()):
            raise ValueError(
                "position_ids restart between two tokens (packed documents) and attention_mask hides "
                "padding; give one of the two: packed documents without a mask, or one padded sequence "
                "in each batch entry"
            )
        return SequenceMetadata(position_ids, None if bool(token_mask.all()) else token_mask, full_mask)
    if T < 2 or not bool(starts.any()):
        return SequenceMetadata(position_ids)
    if past:
        raise ValueError(
            f"position_ids restart (packed documents) and the cache holds {past} positions; packed documents "
            "start with an empty cache, and a document is continued with positions that follow it"
        )
    first = torch.cat([torch.ones_like(starts[:, :1]), starts], dim=1).flatten().nonzero().squeeze(1)
    bounds = torch.cat([first, first.new_tensor([B * T])]).to(torch.int32)
    return SequenceMetadata(position_ids, cu_seqlens=bounds)


def _full_mask(
    B: int, past: int, T: int, attention_mask: Tensor | None, past_mask: Tensor | None
) -> Tensor | None:
    """(B, past + T) bool, or None where every position holds a token."""
    if attention_mask is None:
        if past_mask is None:
            return None
        return torch.cat([past_mask, past_mask.new_ones(B, T)], dim=1)
    if attention_mask.ndim != 2:
        raise ValueError(
            "attention_mask must be (batch, positions) with 1 at tokens, got "
            f"{tuple(attention_mask.shape)}; lightning layers see everything before a token, so other "
            "patterns cannot be honoured"
        )
    if attention_mask.shape != (B, past + T):
        raise ValueError(
            f"attention_mask must be {(B, past + T)}: {past} cached and {T} new positions, got "
            f"{tuple(attention_mask.shape)}"
        )
    if attention_mask.dtype != torch.bool and can_check_values(attention_mask):
        other = attention_mask[(attention_mask != 0) & (attention_mask != 1)]
        if other.numel():
            raise ValueError(
                f"attention_mask holds {other[0].item()}; it is 1 at tokens and 0 at padding, and not added "
                "to scores"
            )
    mask = attention_mask.bool()
    if tracing():
        return mask
    full_mask = None if bool(mask.all()) else mask
    if past and not _equal(past_mask, None if full_mask is None else full_mask[:, :past]):
        raise ValueError(
            "attention_mask hides other cached positions than the mask they were computed with; pass the "
            "same mask, grown by the new positions"
        )
    return full_mask


def _equal(cached: Tensor | None, given: Tensor | None) -> bool:
    if cached is None or given is None:
        one = cached if given is None else given
        return one is None or bool(one.all())
    return torch.equal(cached, given)


def _positions(
    B: int, past: int, T: int, position_ids: Tensor | None, full_mask: Tensor | None, device: torch.device
) -> Tensor:
    if position_ids is not None:
        if position_ids.ndim == 1:
            position_ids = position_ids[None]
        if position_ids.shape[-1] != T or position_ids.shape[0] not in (1, B):
            raise ValueError(f"position_ids must be {(B, T)}, got {tuple(position_ids.shape)}")
        return position_ids.expand(B, T)
    if full_mask is None:
        return torch.arange(past, past + T, device=device).expand(B, T)
    return (full_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
