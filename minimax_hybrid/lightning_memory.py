"""The memory of one lightning layer: a state that fades, and the rows that are not yet in it.

A layer holds each sequence's state at a block boundary (64 positions, counted from the sequence's own first
token) and the k, v rows since. With 150 tokens seen and nothing to take back:

    tokens   0 ........ 63 | 64 ....... 127 | 128 ... 149
    memory                           state ^ | 22 rows

The next token is computed by replaying the open block, so it has the bits of one forward over everything. A
full block is folded into the state at the start of the next call, so `crop` can take the last one back.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from minimax_kernels import BLOCK, lightning_attention, lightning_decode

from .sequences import padded_lightning_attention

MAX_ROLLBACK = 1024


class LightningCacheLayer(CacheLayerMixin):
    """The memory of one lightning layer, for a batch whose sequences each have their own position.

    state: (B, H, Dk, Dv) float32 at the start of the open block.
    k_cache, v_cache: (B, R, H, D), the rows since; counts: (B,) how many of them each sequence holds.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self, max_rollback: int = MAX_ROLLBACK):
        super().__init__()
        self.max_rollback = max_rollback
        self.record_past = False
        self._clear()

    def _clear(self) -> None:
        self.is_initialized = False
        self.length = 0  # positions seen, padding included
        self.state = self.k_cache = self.v_cache = self.counts = self.log_decay = None
        self._settled = False  # full blocks are folded and the rows are one block wide
        self._foldable = True  # no rows are held back for a crop (see activate_past_recording)
        self._plain = 0  # trailing positions at which every sequence has a token
        self._last_real: Tensor | None = None  # the last call's mask, if it had padding

    def attend(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, real: Tensor | None) -> Tensor:
        """Outputs (B, T, H, Dv) of T new positions; those that `real` (B, T) hides leave no trace."""
        if not self.is_initialized:
            self._start(q, k, v, log_decay)
        if self._foldable and not self._settled:
            self._settle()
        self._foldable = not self.record_past
        # a prompt computed under autocast may be continued without it
        self.k_cache, self.v_cache = self.k_cache.to(k.dtype), self.v_cache.to(v.dtype)
        T = q.shape[1]
        can_replay = T == 1 and real is None and self._settled and self._foldable
        if can_replay and not tracked(q, k, v, self.state, self.k_cache, self.v_cache):
            self._own()
            out = lightning_decode(
                q,
                k,
                v,
                log_decay,
                state=self.state,
                k_cache=self.k_cache,
                v_cache=self.v_cache,
                counts=self.counts,
            )
        else:
            out = self._extend(q, k, v, real)
        self._remember(real, T)
        return out

    def current_state(self) -> Tensor | None:
        """The state (B, H, Dk, Dv) after the last position, None before the first call."""
        if not self.is_initialized:
            return None
        return self._advanced(self.k_cache, self.v_cache, self.counts)

    def activate_past_recording(self) -> None:
        """From now on keep the rows since the last `crop`, up to `max_rollback`, not of the last call alone.

        A model that drafts one by one takes its drafts back together; `record_past` turns it off again.
        """
        self.record_past = True

    def check_crop(self, remove: int) -> None:
        """Raise a ValueError unless `remove` positions can be taken back exactly."""
        if not remove:
            return
        if remove > self.length or bool((self._rows_of_last(remove) > self.counts).any()):
            held = self.length if not self.is_initialized else int(self.counts.min())
            raise ValueError(
                f"cannot take back {remove} positions: a lightning layer holds the rows of the last {held}, "
                "older ones are folded into its state; build HybridCache with a larger max_rollback, or "
                "compute the prompt anew"
            )

    def crop(self, tokens_to_remove: int) -> None:
        remove = -int(tokens_to_remove)
        self.check_crop(remove)
        self._foldable = True
        if not remove:
            return
        self.counts = self.counts - self._rows_of_last(remove)
        self.length -= remove
        self._plain = max(0, self._plain - remove)
        if self._last_real is not None:
            left = self._last_real.shape[1] - remove
            self._last_real = self._last_real[:, :left] if left > 0 else None

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    @property
    def batch_size(self) -> int:
        return len(self.counts) if self.is_initialized else -1

    def reset(self) -> None:
        self._clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise TypeError("a lightning layer starts by itself at its first attend()")

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        raise TypeError("a lightning layer has no keys and values to return; it is advanced by attend()")

    def offload(self) -> None:
        """Nothing: the memory is small and stays where it is."""

    def prefetch(self) -> None:
        """Nothing: see `offload`."""

    def _start(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> None:
        B, _, H, Dk = q.shape
        Dv = v.shape[-1]
        work = torch.promote_types(q.dtype, torch.float32)
        self.state = torch.zeros(B, H, Dk, Dv, dtype=work, device=q.device)
        self.k_cache = k.new_zeros(B, BLOCK, H, Dk)
        self.v_cache = v.new_zeros(B, BLOCK, H, Dv)
        self.counts = torch.zeros(B, dtype=torch.int64, device=q.device)
        self.log_decay = log_decay
        self.is_initialized = self._settled = True

    def _own(self) -> None:
        """Make what a decode step writes into safe to write: part of no graph, and no inference tensor."""
        if self.state.requires_grad or self.k_cache.requires_grad or not writable(self.state):
            self.state, self.k_cache, self.v_cache, self.counts = (
                x.detach().clone() for x in (self.state, self.k_cache, self.v_cache, self.counts)
            )

    def _settle(self) -> None:
        """Fold every full block into the state and keep the open block's rows, in room for one block."""
        full = self.counts // BLOCK * BLOCK
        self.state = self._advanced(self.k_cache, self.v_cache, full)
        self.k_cache, self.v_cache = (_take_rows(x, full, BLOCK) for x in (self.k_cache, self.v_cache))
        self.counts = self.counts - full
        self._settled = True

    def _advanced(self, k_cache: Tensor, v_cache: Tensor, counts: Tensor) -> Tensor:
        """The state after the first counts (B,) rows."""
        held = counts.tolist()
        k, v = k_cache[:, : max(held)], v_cache[:, : max(held)]
        mask = None
        if min(held) != max(held):
            mask = torch.arange(max(held), device=counts.device) < counts[:, None]
        return padded_lightning_attention(k, k, v, self.log_decay, mask=mask, state=self.state)[1]

    def _extend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Outputs of new positions after the held rows; keeps the rows since a block boundary."""
        held = self.counts.tolist()
        if real is None and min(held) == max(held):
            return self._extend_together(q, k, v, held[0])
        B, T = q.shape[:2]
        real = q.new_ones(B, T, dtype=torch.bool) if real is None else real
        R = self.k_cache.shape[1]
        was_held = torch.arange(R, device=q.device) < self.counts[:, None]
        mask = torch.cat([was_held, real], dim=1)  # (B, R + T)
        k, v = torch.cat([self.k_cache, k], dim=1), torch.cat([self.v_cache, v], dim=1)
        q = torch.cat([torch.zeros_like(self.k_cache), q], dim=1)
        rank = mask.long().cumsum(1) - 1
        total = mask.sum(1)
        folded = self._boundary(total)
        out = torch.zeros_like(v)
        if bool(folded.any()):
            head = mask & (rank < folded[:, None])
            out, self.state = padded_lightning_attention(q, k, v, self.log_decay, mask=head, state=self.state)
        tail = mask & (rank >= folded[:, None])
        out = out + padded_lightning_attention(q, k, v, self.log_decay, mask=tail, state=self.state)[0]
        self.counts = total - folded
        width = max(int(self.counts.max()), BLOCK)
        row, column = tail.nonzero(as_tuple=True)
        place = (row, (rank - folded[:, None])[row, column])
        self.k_cache, self.v_cache = (
            x.new_zeros(B, width, *x.shape[2:]).index_put(place, x[row, column]) for x in (k, v)
        )
        self._settled = False
        return out[:, R:]

    def _extend_together(self, q: Tensor, k: Tensor, v: Tensor, held: int) -> Tensor:
        """The same where all sequences hold equally many rows and have no padding: no row changes place."""
        if held:
            k, v = (
                torch.cat([self.k_cache[:, :held], k], dim=1),
                torch.cat([self.v_cache[:, :held], v], dim=1),
            )
            q = torch.cat([torch.zeros_like(k[:, :held]), q], dim=1)
        total = k.shape[1]
        folded = int(self._boundary(torch.tensor(total)))
        outs = []
        if folded:
            head = slice(0, folded)
            out, self.state = lightning_attention(
                q[:, head], k[:, head], v[:, head], self.log_decay, state=self.state
            )
            outs.append(out)
            q, k, v = q[:, folded:], k[:, folded:], v[:, folded:]
        outs.append(lightning_attention(q, k, v, self.log_decay, state=self.state)[0])
        self.k_cache, self.v_cache = k.clone(), v.clone()  # the caller's buffer is wider: let it go
        self.counts = torch.full_like(self.counts, total - folded)
        self._settled = False
        return torch.cat(outs, dim=1)[:, held:]

    def _boundary(self, total: Tensor) -> Tensor:
        """Rows to fold out of `total`: whole blocks, so that at least `max_rollback` rows stay."""
        return (total - self.max_rollback).clamp(min=0) // BLOCK * BLOCK

    def _remember(self, real: Tensor | None, T: int) -> None:
        self.length += T
        if real is None:
            self._plain += T
            if T:
                self._last_real = None
        else:
            self._plain = int(real.all(0).flip(0).long().cumprod(0).sum())
            self._last_real = real

    def _rows_of_last(self, remove: int) -> Tensor:
        """How many rows (B,) the last `remove` positions hold; int64's largest where nobody knows."""
        if not self.is_initialized:
            return torch.zeros(1, dtype=torch.int64)
        if remove <= self._plain:
            return torch.full_like(self.counts, remove)
        if self._last_real is not None and remove <= self._last_real.shape[1]:
            return self._last_real[:, -remove:].sum(1)
        return torch.full_like(self.counts, torch.iinfo(torch.int64).max)

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        if not self.is_initialized:
            return
        self.state, self.k_cache, self.v_cache, self.counts = (
            change(x) for x in (self.state, self.k_cache, self.v_cache, self.counts)
        )
        if self._last_real is not None:
            self._last_real = change(self._last_real)


def tracked(*tensors: Tensor | None) -> bool:
    """Whether autograd follows what is computed from these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def writable(x: Tensor) -> bool:
    return not x.is_inference() or torch.is_inference_mode_enabled()


def _take_rows(rows: Tensor, first: Tensor, number: int) -> Tensor:
    """`number` rows of each sequence from its own `first`, (B, number, H, D); zeros past the last."""
    B, R, _, _ = rows.shape
    index = first[:, None] + torch.arange(number, device=rows.device)  # (B, number)
    inside = index < R
    taken = rows[torch.arange(B, device=rows.device)[:, None], index.clamp(max=R - 1)]
    return taken.masked_fill(~inside[:, :, None, None], 0)
