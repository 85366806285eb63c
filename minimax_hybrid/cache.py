"""What generation remembers: keys and values in softmax layers, a fading memory in lightning layers.

A lightning layer holds each sequence's state at a block boundary (64 positions, counted from the sequence's
own first token) and the k, v rows since. With 150 tokens seen and nothing to take back:

    tokens   0 ........ 63 | 64 ....... 127 | 128 ... 149
    cache                            state ^ | 22 rows

The next token is computed by replaying the open block, so it has the bits of one forward over everything. A
full block is folded into the state at the start of the next call, so the last call can be taken back exactly
(`crop`).
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from minimax_kernels import BLOCK, lightning_attention, lightning_decode

from .config import LIGHTNING, MiniMaxM1Config
from .sequences import Sequences, padded_lightning_attention

ROWS_KEPT = 1024


class HybridCache(Cache):
    """The cache of a hybrid model: one layer object for each layer, made for its kind.

    Args:
        config: the model's.
        rows_kept: how far back `crop` reaches at least, in tokens, if the last call had that many. Every call
            keeps its own rows up to this number; more would cost a long prompt more memory than softmax
            layers do.

    `history` is (B, length) bool with the padding seen so far, None if there was none.
    """

    def __init__(self, config: MiniMaxM1Config, *, rows_kept: int = ROWS_KEPT):
        if rows_kept < 1:
            raise ValueError(f"rows_kept is {rows_kept}; it must be at least 1")
        kinds = config.attn_type_list
        super().__init__(
            layers=[LightningLayer(rows_kept) if kind == LIGHTNING else SoftmaxLayer() for kind in kinds]
        )
        self.rows_kept = rows_kept
        self.history: Tensor | None = None
        self._within_call = False

    def begin(self, B: int) -> None:
        """Open a call of B sequences; `end` closes it.

        Raises:
            ValueError: the cache holds another number of sequences, or its last call broke off midway.
        """
        self._check_whole()
        held = max((layer.batch_size for layer in self.layers), default=-1)
        if held not in (-1, B):
            raise ValueError(
                f"the cache holds {held} sequences, got {B}; reorder or repeat them with "
                "batch_select_indices() or batch_repeat_interleave(), or start a new HybridCache"
            )
        self._within_call = True

    def end(self, sequences: Sequences) -> None:
        """Remember which positions of a finished call were real; of packed rows the last document goes on."""
        self._within_call = False
        if sequences.cu_seqlens is not None:
            last = sequences.last_document
            self.history = None if bool(last.all()) else last
        else:
            self.history = sequences.history

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last positions: a negative number of them, or (as older callers do) the length to
        keep.

        Raises:
            ValueError: a lightning layer no longer holds the rows; nothing is changed.
        """
        self._check_whole()
        length = self.get_seq_length()
        tokens_to_remove = int(tokens_to_remove)  # transformers counts in tensors
        remove = max(0, length - tokens_to_remove) if tokens_to_remove > 0 else -tokens_to_remove
        if remove > length:
            raise ValueError(f"cannot take back {remove} positions, the cache holds {length}")
        for layer in self.layers:
            layer.check_crop(remove)
        for layer in self.layers:
            layer.crop(-remove)
        if self.history is not None:
            history = self.history[:, : length - remove]
            self.history = None if bool(history.all()) else history

    def reset(self) -> None:
        super().reset()
        self.history = None
        self._within_call = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.history is not None:
            self.history = self.history[indices.to(self.history.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.history is not None:
            self.history = self.history.repeat_interleave(repeats, dim=0)

    def _check_whole(self) -> None:
        if self._within_call:
            raise ValueError(
                "the last call with this cache broke off midway, so some of its layers have seen tokens that "
                "others have not; reset() it or start a new HybridCache, and compute the prompt anew"
            )


class SoftmaxLayer(DynamicLayer):
    """Keys and values (B, Hkv, T, D), written into room that grows by a quarter instead of copied at each
    token."""

    def __init__(self) -> None:
        super().__init__()
        self._room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if _tracked(key_states, value_states, self.keys, self.values):
            return super().update(key_states, value_states)
        held, new = self.get_seq_length(), key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not self._has_room(held + new, key_states.dtype):
            room = held + new + (held + new) // 4 * (held > 0) + BLOCK
            self._room = tuple(
                x.new_empty(*x.shape[:2], room, x.shape[3]) for x in (key_states, value_states)
            )
            if held:
                self._room[0][:, :, :held] = self.keys
                self._room[1][:, :, :held] = self.values
        for room, x in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, held : held + new] = x
        self.keys, self.values = (room[:, :, : held + new] for room in self._room)
        return self.keys, self.values

    @property
    def batch_size(self) -> int:
        return self.keys.shape[0] if self.is_initialized else -1

    def reset(self) -> None:
        self.keys = self.values = self._room = None
        self.is_initialized = False

    def check_crop(self, remove: int) -> None:
        """Any number of positions can be taken back."""

    def _has_room(self, length: int, dtype: torch.dtype) -> bool:
        """Whether `keys` still lies in our room (selecting rows makes a copy) and `length` positions fit."""
        if self._room is None:
            return False
        room = self._room[0]
        inside = self.keys.numel() == 0 or self.keys.data_ptr() == room.data_ptr()
        fits = self.keys.shape[0] in (0, room.shape[0]) and length <= room.shape[2]
        return inside and fits and room.dtype == dtype and _writable(room)


class LightningLayer(CacheLayerMixin):
    """The memory of one lightning layer, for a batch whose sequences each have their own position.

    state: (B, H, Dk, Dv) float32 at the start of the open block.
    k_rows, v_rows: (B, R, H, D), the rows since; counts: (B,) how many of them each sequence holds.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self, rows_kept: int = ROWS_KEPT):
        super().__init__()
        self.rows_kept = rows_kept
        self.record_past = False
        self._clear()

    def _clear(self) -> None:
        self.is_initialized = False
        self.length = 0
        self.state = self.k_rows = self.v_rows = self.counts = self.log_decay = None
        self._settled = False  # full blocks are folded and the rows are one block wide
        self._foldable = True  # no rows are held back for a crop (see activate_past_recording)
        self._plain = 0  # trailing positions at which every sequence has a token
        self._last_real: Tensor | None = None  # the last call's mask, if it had padding

    def attend(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, real: Tensor | None) -> Tensor:
        """Outputs (B, T, H, Dv) of T new positions; the memory advances over those that `real` (B, T)
        shows."""
        if not self.is_initialized:
            self._start(q, k, v, log_decay)
        if self._foldable and not self._settled:
            self._settle()
        self._foldable = not self.record_past
        # a prompt computed under autocast may be continued without it
        self.k_rows, self.v_rows = self.k_rows.to(k.dtype), self.v_rows.to(v.dtype)
        tracked = _tracked(q, k, v, self.state, self.k_rows, self.v_rows)
        if q.shape[1] == 1 and real is None and self._settled and self._foldable and not tracked:
            self._own()
            out = lightning_decode(
                q,
                k,
                v,
                log_decay,
                state=self.state,
                k_rows=self.k_rows,
                v_rows=self.v_rows,
                counts=self.counts,
            )
        else:
            out = self._extend(q, k, v, real)
        self._remember(real, q.shape[1])
        return out

    def current_state(self) -> Tensor | None:
        """The state (B, H, Dk, Dv) after the last position, None before the first call."""
        if not self.is_initialized:
            return None
        return self._advanced(self.k_rows, self.v_rows, self.counts)

    def activate_past_recording(self) -> None:
        """From now on keep the rows of all calls since the last `crop`, not of the last call alone: a model
        that drafts one by one takes them back together. At most `rows_kept`; `record_past` turns it off."""
        self.record_past = True

    def check_crop(self, remove: int) -> None:
        """Raise a ValueError unless `remove` positions can be taken back exactly."""
        if not remove:
            return
        if remove > self.length or bool((self._rows_of_last(remove) > self.counts).any()):
            held = self.length if not self.is_initialized else int(self.counts.min())
            raise ValueError(
                f"cannot take back {remove} positions: a lightning layer holds the rows of the last {held}, "
                "older ones are folded into its state; build HybridCache with a larger rows_kept, or compute "
                "the prompt anew"
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
        work = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.state = torch.zeros(B, H, Dk, v.shape[-1], dtype=work, device=q.device)
        self.k_rows = k.new_zeros(B, BLOCK, H, Dk)
        self.v_rows = v.new_zeros(B, BLOCK, H, v.shape[-1])
        self.counts = torch.zeros(B, dtype=torch.int64, device=q.device)
        self.log_decay = log_decay
        self.is_initialized = self._settled = True

    def _own(self) -> None:
        """Make what a decode step writes into safe to write: part of no graph, and no inference tensor."""
        if self.state.requires_grad or self.k_rows.requires_grad or not _writable(self.state):
            self.state, self.k_rows, self.v_rows, self.counts = (
                x.detach().clone() for x in (self.state, self.k_rows, self.v_rows, self.counts)
            )

    def _settle(self) -> None:
        """Fold every full block into the state and keep the open block's rows, in room for one block."""
        full = self.counts // BLOCK * BLOCK
        self.state = self._advanced(self.k_rows, self.v_rows, full)
        self.k_rows, self.v_rows = (_take_rows(x, full, BLOCK) for x in (self.k_rows, self.v_rows))
        self.counts = self.counts - full
        self._settled = True

    def _advanced(self, k_rows: Tensor, v_rows: Tensor, counts: Tensor) -> Tensor:
        """The state after the first counts (B,) rows."""
        held = counts.tolist()
        k, v = k_rows[:, : max(held)], v_rows[:, : max(held)]
        mask = (
            None
            if min(held) == max(held)
            else torch.arange(max(held), device=counts.device) < counts[:, None]
        )
        return padded_lightning_attention(k, k, v, self.log_decay, mask=mask, state=self.state)[1]

    def _extend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Run the operator over the open block's rows and the new ones; keep the rows since a block
        boundary."""
        held = self.counts.tolist()
        if real is None and min(held) == max(held):
            return self._extend_together(q, k, v, held[0])
        B, T = q.shape[:2]
        real = q.new_ones(B, T, dtype=torch.bool) if real is None else real
        R = self.k_rows.shape[1]
        was_held = torch.arange(R, device=q.device) < self.counts[:, None]
        mask = torch.cat([was_held, real], dim=1)  # (B, R + T)
        k, v = torch.cat([self.k_rows, k], dim=1), torch.cat([self.v_rows, v], dim=1)
        q = torch.cat([torch.zeros_like(self.k_rows), q], dim=1)
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
        self.k_rows, self.v_rows = (
            x.new_zeros(B, width, *x.shape[2:]).index_put(place, x[row, column]) for x in (k, v)
        )
        self._settled = False
        return out[:, R:]

    def _extend_together(self, q: Tensor, k: Tensor, v: Tensor, held: int) -> Tensor:
        """The same where all sequences hold equally many rows and have no padding: no row changes place."""
        if held:
            k, v = torch.cat([self.k_rows[:, :held], k], dim=1), torch.cat([self.v_rows[:, :held], v], dim=1)
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
        self.k_rows, self.v_rows = k.clone(), v.clone()  # the caller's buffer is wider: let it go
        self.counts = torch.full_like(self.counts, total - folded)
        self._settled = False
        return torch.cat(outs, dim=1)[:, held:]

    def _boundary(self, total: Tensor) -> Tensor:
        """Rows to fold out of `total`: whole blocks, so that at least `rows_kept` rows stay."""
        return (total - self.rows_kept).clamp(min=0) // BLOCK * BLOCK

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
        """How many rows (B,) the last `remove` positions hold; more than any sequence has if that is not
        known."""
        if not self.is_initialized:
            return torch.zeros(1, dtype=torch.int64)
        if remove <= self._plain:
            return torch.full_like(self.counts, remove)
        if self._last_real is not None and remove <= self._last_real.shape[1]:
            return self._last_real[:, -remove:].sum(1)
        return torch.full_like(self.counts, torch.iinfo(torch.int64).max)

    def _map(self, change) -> None:
        if not self.is_initialized:
            return
        self.state, self.k_rows, self.v_rows, self.counts = (
            change(x) for x in (self.state, self.k_rows, self.v_rows, self.counts)
        )
        if self._last_real is not None:
            self._last_real = change(self._last_real)


def _tracked(*tensors: Tensor | None) -> bool:
    """Whether autograd follows what is computed from these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _writable(x: Tensor) -> bool:
    return not x.is_inference() or torch.is_inference_mode_enabled()


def _take_rows(rows: Tensor, first: Tensor, number: int) -> Tensor:
    """`number` rows of each sequence from its own first one: (B, R, H, D) -> (B, number, H, D); extra ones
    are 0."""
    index = first[:, None] + torch.arange(number, device=rows.device)
    inside = index < rows.shape[1]
    taken = rows[torch.arange(len(rows), device=rows.device)[:, None], index.clamp(max=rows.shape[1] - 1)]
    return taken.masked_fill(~inside[:, :, None, None], 0)
