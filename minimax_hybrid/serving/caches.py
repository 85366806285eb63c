"""Caches of many lengths in one batch. Every function here copies, so that a cache may be shared.

A batch is padded on the left to its longest sequence. Lightning layers have no length: their block memories
are put side by side. With sequences of 3 and 5 tokens:

    softmax keys      . . a b c        state of a, 3 positions of its block
                      d e f g h        state of d, 5 positions of its block
"""

from collections.abc import Iterator, Sequence
from copy import copy
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from minimax_kernels import BlockMemory

from ..cache import HybridCache, LightningCacheLayer, SoftmaxCacheLayer
from ..config import MiniMaxM1Config


def empty_cache(model: PreTrainedModel) -> HybridCache:
    """Nothing is taken back here, so lightning layers keep one block of keys and values, the least."""
    return HybridCache(cast(MiniMaxM1Config, model.config), max_rollback=1)


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
        for x, new in zip(_parts(layer), _parts(source), strict=True):
            if isinstance(layer, LightningCacheLayer):
                x[slot] = new[0]
            else:
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
    first, parts = layers[0], list(zip(*map(_parts, layers), strict=True))
    if isinstance(first, LightningCacheLayer):
        return _lightning(BlockMemory(*map(torch.cat, parts)), first.max_rollback, T)
    keys, values = (torch.cat([pad(x, (0, 0, T - x.shape[2], 0)) for x in tensors]) for tensors in parts)
    return _softmax(keys, values)


def _mapped(
    cache: HybridCache, sequences: Tensor, columns: Tensor | None, token_mask: Tensor | None
) -> HybridCache:
    """Copies of some sequences (n,) and some columns (T,) bool, all if None."""
    found = copy(cache)
    length = cache.get_seq_length() if columns is None else int(columns.sum())
    found.layers, found.token_mask = [], token_mask
    for layer in cache.layers:
        parts = _parts(layer)
        if isinstance(layer, SoftmaxCacheLayer) and columns is not None:
            # the last columns are a view, and nothing is copied twice
            tail = bool(columns[-length:].all())
            parts = tuple(x[:, :, -length:] if tail else x[:, :, columns.to(x.device)] for x in parts)
        chosen = [x[sequences.to(x.device)] for x in parts]
        if isinstance(layer, LightningCacheLayer):
            found.layers.append(_lightning(BlockMemory(*chosen), layer.max_rollback, length))
        else:
            found.layers.append(_softmax(*chosen))
    return found


def _parts(layer: LightningCacheLayer | SoftmaxCacheLayer) -> tuple[Tensor, ...]:
    """What a layer that has seen something holds: its block memory, or keys and values."""
    if isinstance(layer, LightningCacheLayer):
        assert layer.stored is not None
        return tuple(layer.stored)
    assert layer.keys is not None and layer.values is not None
    return layer.keys, layer.values


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
    return (x for layer in cache.layers if layer.is_initialized for x in _parts(layer))


def _some_tensor(cache: HybridCache) -> Tensor:
    return next(_tensors(cache))
