"""What generation remembers. The cache stores, crops, reorders and repeats; layers compute.

Of a prompt of T tokens, M1 keeps ten layers' keys and values, which grow with T, and seventy layers' block
memories (`minimax_kernels.BlockMemory`), which do not.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from minimax_kernels import BLOCK, BlockMemory
from minimax_kernels.backends import tracked, writable

from .config import LIGHTNING, MiniMaxM1Config

MAX_ROLLBACK = 1024


class HybridCache(Cache):
    """The cache of a hybrid model: one layer object for each layer, made for its kind.

    Args:
        config: the model's.
        max_rollback: how far back `crop` reaches at least, in tokens, if the last call had that many. Every
            call keeps its own keys and values up to this number; more would cost a long prompt more memory
            than softmax layers do.

    `token_mask` is (B, length) bool, false at the padding seen so far; None if there was none.
    """

    layers: list[Any]

    def __init__(self, config: MiniMaxM1Config, *, max_rollback: int = MAX_ROLLBACK):
        if max_rollback < 1:
            raise ValueError(f"max_rollback is {max_rollback}; it must be at least 1")
        super().__init__(
            layers=[
                LightningCacheLayer(max_rollback) if kind == LIGHTNING else SoftmaxCacheLayer()
                for kind in config.attn_type_list
            ]
        )
        self.max_rollback = max_rollback
        self.token_mask: Tensor | None = None
        self._within_call = False

    def begin(self, B: int) -> None:
        """Open a call of B sequences; `end` closes it.

        Raises:
            ValueError: the cache holds another number of sequences, or its last call broke off midway.
        """
        self._check_whole()
        cached = max((layer.batch_size for layer in self.layers), default=-1)
        if cached not in (-1, B):
            raise ValueError(
                f"the cache holds {cached} sequences, got {B}; reorder or repeat them with "
                "batch_select_indices() or batch_repeat_interleave(), or start a new HybridCache"
            )
        self._within_call = True

    def end(self, token_mask: Tensor | None) -> None:
        """Close a call, with the mask (B, length) of all positions that are cached now."""
        self._within_call = False
        self.token_mask = token_mask

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last positions, -n of them; a positive number is the length to keep (older callers).

        Raises:
            ValueError: a lightning layer has folded some of them into its state; nothing is changed.
        """
        self._check_whole()
        length = self.get_seq_length()
        tokens_to_remove = int(tokens_to_remove)  # transformers counts in tensors
        remove = max(0, length - tokens_to_remove) if tokens_to_remove > 0 else -tokens_to_remove
        if remove > length:
            raise ValueError(f"cannot take back {remove} positions, the cache holds {length}")
        mask = self.token_mask
        tokens = remove if mask is None or not remove else mask[:, -remove:].sum(1)
        lightning = [layer for layer in self.layers if isinstance(layer, LightningCacheLayer)]
        for layer in lightning:
            layer.check_rollback(tokens)
        for layer in self.layers:
            if isinstance(layer, LightningCacheLayer):
                layer.rollback(remove, tokens)
            else:
                layer.crop(-remove)
        if mask is not None:
            mask = mask[:, : length - remove]
            self.token_mask = None if bool(mask.all()) else mask

    def reset(self) -> None:
        super().reset()
        self.token_mask = None
        self._within_call = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.token_mask is not None:
            self.token_mask = self.token_mask[indices.to(self.token_mask.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.token_mask is not None:
            self.token_mask = self.token_mask.repeat_interleave(repeats, dim=0)

    def _check_whole(self) -> None:
        if self._within_call:
            raise ValueError(
                "the last call with this cache broke off midway, so some of its layers have seen tokens that "
                "others have not; reset() it or start a new HybridCache, and compute the prompt again"
            )


class LightningCacheLayer(CacheLayerMixin):
    """The block memory of one lightning layer. The layer computes the next one and puts it here.

    `stored` is that memory, None before the first call. `may_fold`: no positions wait for a crop (see
    `activate_past_recording`), so full blocks may go into the state at the start of the next call.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self, max_rollback: int = MAX_ROLLBACK):
        super().__init__()
        self.max_rollback = max_rollback
        self.record_past = False
        self.reset()

    def reset(self) -> None:
        self.is_initialized = False
        self.may_fold = True
        self.length = 0  # positions seen, padding included
        self.stored: BlockMemory | None = None

    def memory(self, k: Tensor, v: Tensor) -> BlockMemory:
        """The memory so far, with caches in the types of k and v (B, T, H, D); an empty one at the start."""
        if self.stored is None:
            return BlockMemory.empty(k, v)
        # a prompt computed under autocast may be continued without it
        state, k_cache, v_cache, seqlens = self.stored
        return BlockMemory(state, k_cache.to(k.dtype), v_cache.to(v.dtype), seqlens)

    def put(self, memory: BlockMemory, new_positions: int) -> None:
        """Store the memory after `new_positions` more."""
        self.stored, self.is_initialized = memory, True
        self.length += new_positions
        self.may_fold = not self.record_past

    def activate_past_recording(self) -> None:
        """From now on keep the positions since the last `crop`, not of the last call alone.

        A model that drafts one by one takes its drafts back together; `record_past` turns it off again.
        """
        self.record_past = True

    def check_rollback(self, tokens: Tensor | int) -> None:
        """Raise a ValueError unless `tokens` (B,) or all alike can be taken back exactly."""
        if self.stored is not None and bool((self.stored.cache_seqlens < tokens).any()):
            raise ValueError(
                f"cannot take back {torch.as_tensor(tokens).tolist()} tokens: a lightning layer holds the "
                f"last {self.stored.cache_seqlens.tolist()} of each sequence, older ones are folded into its "
                "state; build HybridCache with a larger max_rollback, or compute the prompt again"
            )

    def rollback(self, positions: int, tokens: Tensor | int) -> None:
        """Take back the last positions, which hold `tokens` (B,) of each sequence or as many in all."""
        self.may_fold = True
        self.length -= positions
        if self.stored is not None:
            seqlens = self.stored.cache_seqlens - tokens
            self.stored = self.stored._replace(cache_seqlens=seqlens)

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    @property
    def batch_size(self) -> int:
        return -1 if self.stored is None else len(self.stored.cache_seqlens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.stored is not None:
            self.stored = self.stored.map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.stored is not None:
            self.stored = self.stored.map(lambda x: x.repeat_interleave(repeats, dim=0))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise TypeError("a lightning cache layer is filled by put(), not by keys and values")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a lightning cache layer has no keys and values to return; see memory() and put()")

    def offload(self) -> None:
        """Nothing: the memory is small and stays where it is."""

    def prefetch(self) -> None:
        """Nothing: see `offload`."""


class SoftmaxCacheLayer(DynamicLayer):
    """Keys and values (B, Hkv, T, D), in room that grows by a quarter, so few tokens copy them all."""

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._room: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if tracked(key_states, value_states, self.keys, self.values):
            return super().update(key_states, value_states)
        cached, new = self.get_seq_length(), key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        room = self._room_for(cached + new, key_states, value_states)
        for buffer, x in zip(room, (key_states, value_states), strict=True):
            buffer[:, :, cached : cached + new] = x
        self.keys, self.values = (buffer[:, :, : cached + new] for buffer in room)
        return self.keys, self.values

    @property
    def batch_size(self) -> int:
        return self.keys.shape[0] if self.is_initialized else -1

    def reset(self) -> None:
        self.keys = self.values = self._room = None  # type: ignore[assignment]
        self.is_initialized = False

    def _room_for(self, length: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Buffers for `length` positions, with the cached ones at their start."""
        if self._room is not None and self._fits(self._room[0], length, k.dtype):
            return self._room
        cached = self.get_seq_length()
        width = length + BLOCK + (length // 4 if cached else 0)
        k_room, v_room = (x.new_empty(*x.shape[:2], width, x.shape[3]) for x in (k, v))
        if cached:
            k_room[:, :, :cached] = self.keys
            v_room[:, :, :cached] = self.values
        self._room = k_room, v_room
        return self._room

    def _fits(self, room: Tensor, length: int, dtype: torch.dtype) -> bool:
        """Whether `keys` still lies in our room (selecting sequences makes a copy) and `length` fits."""
        inside = self.keys.numel() == 0 or self.keys.data_ptr() == room.data_ptr()
        fits = self.keys.shape[0] in (0, room.shape[0]) and length <= room.shape[2]
        return inside and fits and room.dtype == dtype and writable(room)
