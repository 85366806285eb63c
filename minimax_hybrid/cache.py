"""What generation remembers: keys and values in softmax layers, a fading memory in lightning layers.

Of a prompt of T tokens, M1 keeps ten layers' keys and values, which grow with T, and seventy layers' states,
which do not (`lightning_memory.py`).
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from minimax_kernels import BLOCK

from .config import LIGHTNING, MiniMaxM1Config
from .lightning_memory import MAX_ROLLBACK, LightningCacheLayer, tracked, writable
from .sequences import Sequences


class HybridCache(Cache):
    """The cache of a hybrid model: one layer object for each layer, made for its kind.

    Args:
        config: the model's.
        max_rollback: how far back `crop` reaches at least, in tokens, if the last call had that many. Every
            call keeps its own keys and values up to this number; more would cost a long prompt more memory
            than softmax layers do.

    `history` is (B, length) bool with the padding seen so far, None if there was none.
    """

    def __init__(self, config: MiniMaxM1Config, *, max_rollback: int = MAX_ROLLBACK):
        if max_rollback < 1:
            raise ValueError(f"max_rollback is {max_rollback}; it must be at least 1")
        kinds = config.attn_type_list
        super().__init__(
            layers=[
                LightningCacheLayer(max_rollback) if kind == LIGHTNING else SoftmaxCacheLayer()
                for kind in kinds
            ]
        )
        self.max_rollback = max_rollback
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
        """Take back the last positions, -n of them; a positive number is the length to keep (older callers).

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


class SoftmaxCacheLayer(DynamicLayer):
    """Keys and values (B, Hkv, T, D), in room that grows by a quarter, so few tokens copy them all."""

    def __init__(self) -> None:
        super().__init__()
        self._room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if tracked(key_states, value_states, self.keys, self.values):
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
        return inside and fits and room.dtype == dtype and writable(room)
