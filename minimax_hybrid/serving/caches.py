"""Caches of many lengths in one batch. Every function here copies, so that a cache may be shared.

A batch is padded on the left to its longest sequence. Lightning layers have no length: their block memories
are put side by side. With sequences of 3 and 5 tokens:

    softmax keys      . . a b c        state of a, 3 positions of its block
                      d e f g h        state of d, 5 positions of its block
"""

from collections.abc import Iterator, Sequence
from copy import copy

import torch
from torch import Tensor
from torch.nn.functional import pad

from minimax_kernels import BlockMemory

from ..cache import HybridCache, LightningCacheLayer, SoftmaxCacheLayer
from ..config import MiniMaxM1Config


def empty_cache(config: MiniMaxM1Config) -> HybridCache:
    """Nothing is taken back here, so lightning layers keep one block of keys and values, the least."""
    return HybridCache(config, max_rollback=1)


def join(caches: Sequence[HybridCache]) -> HybridCache:
    """One cache of all their sequences, in this order; shorter ones are padded on the left."""
    lengths = [cache.get_seq_length() for cache in caches]
    T = max(lengths)
    joined = copy(caches[0])
    joined.layers = [
        _joined_layer(layers, T) for layers in zip(*(cache.layers for cache in caches), strict=True)
    ]
    mask = torch.cat([_mask(cache, T) for cache in caches])
    joined.token_mask = None if bool(mask.all()) else mask
    return joined


def take(cache: HybridCache, i: int) -> HybridCache:
    """Sequence i alone, without padding."""
    mask = None if cache.token_mask is None else cache.token_mask[i]
    return _mapped(cache, torch.tensor([i]), mask, None)


def keep(cache: HybridCache, indices: Sequence[int]) -> HybridCache:
    """Some of the sequences, without the padding that is left of all of them."""
    chosen = torch.tensor(indices)
    if cache.token_mask is None:
        return _mapped(cache, chosen, None, None)
    mask = cache.token_mask[chosen.to(cache.token_mask.device)]
    first = int(mask.any(0).int().argmax())
    columns = torch.arange(mask.shape[1], device=mask.device) >= first
    mask = mask[:, first:]
    return _mapped(cache, chosen, columns, None if bool(mask.all()) else mask)


def place(batch: HybridCache, slot: int, cache: HybridCache) -> None:
    """Overwrite sequence `slot` with the one of `cache`, which is no longer than the batch."""
    T, length = batch.get_seq_length(), cache.get_seq_length()
    for layer, source in zip(batch.layers, cache.layers, strict=True):
        if isinstance(layer, LightningCacheLayer):
            for x, new in zip(layer.stored, source.stored, strict=True):
                x[slot] = new[0]
        else:
            for x, new in ((layer.keys, source.keys), (layer.values, source.values)):
                x[slot, :, : T - length] = 0
                x[slot, :, T - length :] = new[0]
    if batch.token_mask is None and length < T:
        some = _some_tensor(batch)
        batch.token_mask = torch.ones(len(some), T, dtype=torch.bool, device=some.device)
    if batch.token_mask is not None:
        mask = batch.token_mask.clone()
        mask[slot] = torch.arange(T, device=mask.device) >= T - length
        batch.token_mask = mask


def cache_bytes(cache: HybridCache) -> int:
    return sum(x.nbytes for x in _tensors(cache))


def position_bytes(config: MiniMaxM1Config, dtype: torch.dtype) -> int:
    """Bytes of one cached position in all softmax layers."""
    softmax = sum(map(bool, config.attn_type_list))
    return softmax * 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize


def _mask(cache: HybridCache, T: int) -> Tensor:
    """(B, T) bool with the padding that makes it T positions."""
    some, length = _some_tensor(cache), cache.get_seq_length()
    mask = cache.token_mask
    if mask is None:
        mask = torch.ones(len(some), length, dtype=torch.bool, device=some.device)
    return pad(mask, (T - length, 0), value=False)


def _joined_layer(
    layers: Sequence[LightningCacheLayer | SoftmaxCacheLayer], T: int
) -> LightningCacheLayer | SoftmaxCacheLayer:
    first = layers[0]
    if isinstance(first, LightningCacheLayer):
        parts = [layer.stored for layer in layers]
        return _lightning(
            BlockMemory(*(torch.cat(x) for x in zip(*parts, strict=True))), first.max_rollback, T
        )
    keys, values = (
        torch.cat([pad(x, (0, 0, T - x.shape[2], 0)) for x in tensors])
        for tensors in ([layer.keys for layer in layers], [layer.values for layer in layers])
    )
    return _softmax(keys, values)


def _mapped(
    cache: HybridCache, sequences: Tensor, columns: Tensor | None, token_mask: Tensor | None
) -> HybridCache:
    """Copies of some sequences (n,) and some columns (T,) bool, all if None."""
    found = copy(cache)
    length = cache.get_seq_length() if columns is None else int(columns.sum())
    found.layers, found.token_mask = [], token_mask
    for layer in cache.layers:
        if isinstance(layer, LightningCacheLayer):
            memory = layer.stored.map(lambda x: x[sequences.to(x.device)])
            found.layers.append(_lightning(memory, layer.max_rollback, length))
        else:
            kept = (layer.keys, layer.values)
            if columns is not None:
                # the last columns are a view, and nothing is copied twice
                tail = bool(columns[-length:].all())
                kept = tuple(x[:, :, -length:] if tail else x[:, :, columns.to(x.device)] for x in kept)
            found.layers.append(_softmax(*(x[sequences.to(x.device)] for x in kept)))
    return found


def _lightning(memory: BlockMemory, max_rollback: int, length: int) -> LightningCacheLayer:
    layer = LightningCacheLayer(max_rollback)
    layer.put(memory, length)
    return layer


def _softmax(keys: Tensor, values: Tensor) -> SoftmaxCacheLayer:
    layer = SoftmaxCacheLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer


def _tensors(cache: HybridCache) -> Iterator[Tensor]:
    for layer in cache.layers:
        if isinstance(layer, LightningCacheLayer):
            yield from layer.stored or ()
        elif layer.is_initialized:
            yield from (layer.keys, layer.values)


def _some_tensor(cache: HybridCache) -> Tensor:
    return next(_tensors(cache))
