"""The sequences that are decoded together: one cache with a place for each.

A finished sequence leaves its place empty; it is computed along until another takes it or too many are empty.
Nothing is moved when one request follows another.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache import HybridCache
from ..compat import CACHE_NAME
from .caches import cache_bytes, join, keep, place, take
from .scheduler import Running

MOST_EMPTY = 0.25  # of all places, before they are removed


class Batch:
    """`slots` are the places, in the cache's order; `max_tokens` bounds places times positions."""

    def __init__(self, model: PreTrainedModel, *, max_tokens: int):
        self.model, self.max_tokens = model, max_tokens
        self.slots: list[Running | None] = []
        self.cache: HybridCache | None = None

    @property
    def running(self) -> list[Running]:
        return [one for one in self.slots if one is not None]

    @property
    def nbytes(self) -> int:
        return 0 if self.cache is None else cache_bytes(self.cache)

    def clear(self) -> None:
        self.slots, self.cache = [], None

    def add(self, new: Sequence[tuple[Running, HybridCache]]) -> None:
        """Let sequences in, with caches that are not written into."""
        if not new:
            return
        if self.cache is None:
            caches = []
        else:
            new = self._fill(new, self.cache)
            if not new:
                return
            self.compact()
            caches = [] if self.cache is None else [self.cache]
        self.cache = join([*caches, *(cache for _, cache in new)])
        self.slots += [one for one, _ in new]

    def _fill(
        self, new: Sequence[tuple[Running, HybridCache]], batch: HybridCache
    ) -> list[tuple[Running, HybridCache]]:
        """Put sequences into empty places; returns those for which there are none, or none long enough."""
        T, left = batch.get_seq_length(), []
        empty = [i for i, one in enumerate(self.slots) if one is None]
        for one, cache in new:
            if empty and cache.get_seq_length() <= T:
                slot = empty.pop()
                place(batch, slot, cache)
                self.slots[slot] = one
            else:
                left.append((one, cache))
        return left

    def remove(self, one: Running) -> None:
        self.slots[self.slots.index(one)] = None

    def cache_of(self, one: Running) -> HybridCache:
        """A copy of what is cached of it: all of its tokens but the last."""
        assert self.cache is not None
        return take(self.cache, self.slots.index(one))

    def compact(self) -> None:
        """Remove empty places, and padding that is left of all sequences."""
        if self.cache is None:
            return
        full = [i for i, one in enumerate(self.slots) if one is not None]
        self.cache = keep(self.cache, full) if full else None
        self.slots = [self.slots[i] for i in full]

    def step(self) -> tuple[list[Running], Tensor]:
        """Those that run and the logits (n, V) after their last tokens."""
        empty = self.slots.count(None)
        if empty > MOST_EMPTY * len(self.slots) or self._too_wide():
            self.compact()
        running = self.running
        if self.cache is None or not running:
            return [], torch.empty(0)
        device = self.model.device
        last = [(one.tokens[-1], one.length - 1) if one else (0, 0) for one in self.slots]
        ids, positions = torch.tensor(last, device=device).T[:, :, None]
        experts = any(one.sampling.output_routed_experts for one in running)
        out = self.model(
            input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1,
            output_routed_experts=experts, **{CACHE_NAME: self.cache},
        )  # fmt: skip
        places = [i for i, one in enumerate(self.slots) if one is not None]
        if experts:
            for i, one in zip(places, running, strict=True):
                if one.sampling.output_routed_experts:
                    one.routed_experts.append(out.routed_experts[i].to(torch.int16))
        logits = out.logits[:, -1].float()
        return running, logits if len(running) == len(logits) else logits[places]

    def _too_wide(self) -> bool:
        """Whether another position in every place would be more than was reserved."""
        if self.cache is None:
            return False
        return len(self.slots) * (self.cache.get_seq_length() + 1) > self.max_tokens
