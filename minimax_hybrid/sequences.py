"""Where the sequences lie in the rows of one call: which positions are real, and where documents begin.

A mask that contains zeros means padding. Position ids that restart mean packed documents, but only without
such a mask: the padded rows of `generate` restart too, where the padding ends. Both become the operator's
`cu_seqlens`, here and nowhere else.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minimax_kernels import lightning_attention, pack, unpack

if TYPE_CHECKING:
    from .cache import HybridCache


@dataclass(frozen=True)
class Sequences:
    """The positions of one call, T new ones after `past` cached ones.

    real: (B, T) bool, which new positions hold a token; None if all do.
    history: (B, past + T) bool, the same with the cached positions in front; None if all do.
    cu_seqlens: (S + 1,) int32 bounds of packed documents in the flattened rows (B * T); None if not packed.
    position_ids: (B, T), from 0 at the first token of each document.
    """

    position_ids: Tensor
    real: Tensor | None = None
    history: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @cached_property
    def previous(self) -> Tensor:
        """(B, T), the column of the token before each token in its own document, wherever padding lies; -1
        where there is none, and at padding."""
        B, T = self.position_ids.shape
        column = torch.arange(T, device=self.position_ids.device).expand(B, T)
        if self.real is not None:
            last = torch.where(self.real, column, -1).cummax(-1).values
            before = torch.nn.functional.pad(last[:, :-1], (1, 0), value=-1)
            return torch.where(self.real, before, -1)
        before = column - 1
        if self.cu_seqlens is not None:
            before = before.flatten().index_fill(0, self.cu_seqlens[:-1].long(), -1).view(B, T)
        return before

    def next_tokens(self, tokens: Tensor) -> Tensor:
        """(B, T): at each position which of `tokens` (B, T) is predicted from it, -100 where none is."""
        previous = self.previous
        # column 0 takes what has no predecessor
        shifted = tokens.new_full((tokens.shape[0], tokens.shape[1] + 1), -100)
        shifted.scatter_(1, previous + 1, torch.where(previous >= 0, tokens, -100))
        return shifted[:, 1:].contiguous()

    @cached_property
    def last_document(self) -> Tensor:
        """(B, T) bool, the positions of each row's last packed document."""
        B, T = self.position_ids.shape
        row = torch.arange(B * T, device=self.position_ids.device).view(B, T)
        starts = self.cu_seqlens[:-1].long()
        last = starts[torch.searchsorted(starts, row[:, -1].contiguous(), right=True) - 1]  # (B,)
        return row >= last[:, None]


def find_sequences(
    B: int,
    T: int,
    *,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: "HybridCache | None",
    device: torch.device,
) -> Sequences:
    """The sequences that the caller's mask (B, past + T) and position ids (B or 1, T) describe.

    Raises:
        ValueError: a mask or position ids that do not fit the input, the cache or each other.
    """
    past = cache.get_seq_length() if cache is not None else 0
    history = _history(B, past, T, attention_mask, cache)
    position_ids = _positions(B, past, T, position_ids, history, device)
    starts = position_ids[:, 1:] != position_ids[:, :-1] + 1  # (B, T - 1)
    if history is not None:
        real = history[:, past:]
        # of two tokens with padding between them, too, the second comes later in the same sequence
        highest = torch.where(real, position_ids, -1).cummax(-1).values
        restarts = starts & real[:, :-1] | (position_ids[:, 1:] <= highest[:, :-1])
        if bool((restarts & real[:, 1:]).any()):
            raise ValueError(
                "position_ids restart between two real tokens (packed documents) and attention_mask hides "
                "padding; give one of the two: packed rows without a mask, or one sequence in each padded row"
            )
        return Sequences(position_ids, None if bool(real.all()) else real, history)
    if T < 2 or not bool(starts.any()):
        return Sequences(position_ids)
    if past:
        raise ValueError(
            f"position_ids restart (packed documents) and the cache holds {past} positions; packed rows "
            "start with an empty cache, and a document is continued with positions that follow it"
        )
    first = torch.cat([torch.ones_like(starts[:, :1]), starts], dim=1).flatten().nonzero().squeeze(1)
    bounds = torch.cat([first, first.new_tensor([B * T])]).to(torch.int32)
    return Sequences(position_ids, cu_seqlens=bounds)


def uncached_sequences(
    tokens: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> Sequences:
    """Sequences that continue no cache, in rows of tokens (B, T); of a mask, the last T columns count."""
    B, T = tokens.shape
    mask = None if attention_mask is None else attention_mask[:, -T:]
    return find_sequences(
        B, T, attention_mask=mask, position_ids=position_ids, cache=None, device=tokens.device
    )


def padded_lightning_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, mask: Tensor | None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`lightning_attention` over a padded batch: what `mask` (B, T) hides neither fades nor feeds memory.

    The real rows of each sequence are packed, so blocks count from its first token wherever the padding lies.
    """
    if mask is None:
        return lightning_attention(q, k, v, log_decay, state=state)
    (q, cu_seqlens), (k, _), (v, _) = (pack(x, mask) for x in (q, k, v))
    out, state = lightning_attention(q, k, v, log_decay, state=state, cu_seqlens=cu_seqlens)
    return unpack(out, mask), state


def _history(
    B: int, past: int, T: int, attention_mask: Tensor | None, cache: "HybridCache | None"
) -> Tensor | None:
    """(B, past + T) bool, or None where every position is real."""
    remembered = cache.history if cache is not None else None  # (B, past) or None
    if attention_mask is None:
        if remembered is None:
            return None
        return torch.cat([remembered, remembered.new_ones(B, T)], dim=1)
    if attention_mask.ndim != 2:
        raise ValueError(
            "attention_mask must be (batch, positions) with 1 at real tokens, got "
            f"{tuple(attention_mask.shape)}; lightning layers see everything before a token, so other "
            "patterns cannot be honoured"
        )
    if attention_mask.shape != (B, past + T):
        raise ValueError(
            f"attention_mask must be {(B, past + T)}: {past} cached and {T} new positions, got "
            f"{tuple(attention_mask.shape)}"
        )
    if attention_mask.dtype != torch.bool and attention_mask.device.type == "cpu":
        other = attention_mask[(attention_mask != 0) & (attention_mask != 1)]
        if other.numel():
            raise ValueError(
                f"attention_mask holds {other[0].item()}; it is 1 at tokens and 0 at padding, and not added "
                "to scores"
            )
    history = attention_mask.bool()
    if bool(history.all()):
        history = None
    if past and not _equal(remembered, None if history is None else history[:, :past]):
        raise ValueError(
            "attention_mask hides other cached positions than the mask they were computed with; pass the "
            "same mask, grown by the new positions"
        )
    return history


def _equal(remembered: Tensor | None, given: Tensor | None) -> bool:
    if remembered is None or given is None:
        hidden = remembered if given is None else given
        return hidden is None or bool(hidden.all())
    return torch.equal(remembered, given)


def _positions(
    B: int, past: int, T: int, position_ids: Tensor | None, history: Tensor | None, device: torch.device
) -> Tensor:
    if position_ids is not None:
        if position_ids.ndim == 1:
            position_ids = position_ids[None]
        if position_ids.shape[-1] != T or position_ids.shape[0] not in (1, B):
            raise ValueError(f"position_ids must be {(B, T)}, got {tuple(position_ids.shape)}")
        return position_ids.expand(B, T)
    if history is None:
        return torch.arange(past, past + T, device=device).expand(B, T)
    return (history.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
