"""Prompts on their way into the cache, in pieces, each prompt once however many requests share it.

Prompts that are equally far are computed in one call. A mixed call with decoding sequences, packed by
`cu_seqlens`, is left out: packed documents begin with an empty cache in this model, as PyTorch has no packed
softmax attention over cached keys on every device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from minimax_kernels import BLOCK

from ..cache import HybridCache
from ..compat import CACHE_NAME
from .caches import empty_cache, join, take
from .prefix_cache import PrefixCache, Snapshot
from .scheduler import Running


@dataclass(eq=False)
class Prefill:
    """One prompt, `done` tokens of which are in `cache`.

    Args:
        members: the requests that wait for it.
        border: where to take a snapshot on the way; 0 for nowhere.
        shared: `cache` is a snapshot, too, and must not be written into.
        versions: of the weights that computed it.
    """

    prompt: list[int]
    wants_experts: bool
    cache: HybridCache
    members: list[Running]
    done: int = 0
    border: int = 0
    shared: bool = False
    logits: Tensor | None = None
    routed_experts: list[Tensor] = field(default_factory=list)
    versions: tuple[int, ...] = ()

    @property
    def rest(self) -> int:
        """Tokens up to the next snapshot."""
        return (self.border if self.done < self.border else len(self.prompt)) - self.done

    def snapshot(self) -> Snapshot:
        self.shared = True
        experts = torch.cat(self.routed_experts) if self.wants_experts else None
        return Snapshot(self.done, self.cache, self.logits, experts)


class Prefiller:
    """Computes prompts, `chunk` tokens a step, first come first served."""

    def __init__(self, model: PreTrainedModel, prefixes: PrefixCache, *, chunk: int):
        if chunk < 1:
            raise ValueError(f"prefill_chunk is {chunk}; it must be at least 1")
        self.model, self.prefixes, self.chunk = model, prefixes, chunk
        self.jobs: list[Prefill] = []

    @property
    def members(self) -> list[Running]:
        return [one for job in self.jobs for one in job.members]

    def add(self, new: Running, version: int) -> None:
        """Start a request's prompt, from a snapshot if there is one, or wait with others for the same one."""
        prompt, experts = new.request.prompt, new.sampling.output_routed_experts
        for job in self.jobs:
            if job.prompt == prompt and job.wants_experts == experts and job.versions in ((), (version,)):
                job.members.append(new)
                new.cached_prompt_tokens = len(prompt)
                return
        job = Prefill(prompt, experts, empty_cache(self.model), [new])
        self.jobs.append(job)
        found, common = self.prefixes.lookup(prompt, routed_experts=experts)
        if found is not None:
            job.cache, job.done, job.shared, job.versions = found.cache, found.length, True, (version,)
            job.logits = found.logits
            job.routed_experts = [] if found.routed_experts is None else [found.routed_experts]
            new.cached_prompt_tokens = found.length
        border = common // BLOCK * BLOCK
        job.border = border if job.done < border < len(prompt) else 0

    def cancel(self, request_id: int) -> Running | None:
        for job in self.jobs:
            for one in job.members:
                if one.id == request_id:
                    job.members.remove(one)
                    self.jobs = [job for job in self.jobs if job.members]
                    return one
        return None

    def step(self, version: int) -> list[Prefill]:
        """Compute at most `chunk` more tokens; returns the prompts that are complete, and forgets them."""
        together = self._next()
        if together:
            self._compute(together, version)
        complete = [job for job in self.jobs if job.done == len(job.prompt)]
        self.jobs = [job for job in self.jobs if job.done < len(job.prompt)]
        return complete

    def _next(self) -> list[Prefill]:
        """The first prompt and others that are as far as it, as many as fit into one padded piece."""
        waiting = [job for job in self.jobs if job.done < len(job.prompt)]
        chosen: list[Prefill] = waiting[:1]
        width = min(chosen[0].rest, self.chunk) if chosen else 0
        for job in waiting[1:]:
            wider = max(width, min(job.rest, self.chunk))
            if job.done == chosen[0].done and (len(chosen) + 1) * wider <= self.chunk:
                chosen.append(job)
                width = wider
        return chosen

    def _compute(self, jobs: Sequence[Prefill], version: int) -> None:
        pieces = [job.prompt[job.done : job.done + min(job.rest, self.chunk)] for job in jobs]
        done, T = jobs[0].done, max(map(len, pieces))
        device = self.model.device
        ids = torch.tensor([[0] * (T - len(piece)) + piece for piece in pieces], device=device)
        mask = torch.tensor([[1] * done + [0] * (T - len(piece)) + [1] * len(piece) for piece in pieces])
        cache = self._cache_for(jobs)
        out = self.model(
            input_ids=ids, attention_mask=mask.to(device), use_cache=True, logits_to_keep=1,
            output_routed_experts=any(job.wants_experts for job in jobs), **{CACHE_NAME: cache},
        )  # fmt: skip
        logits = out.logits[:, -1].float()
        for i, (job, piece) in enumerate(zip(jobs, pieces, strict=True)):
            job.done += len(piece)
            keep = bool(self.prefixes.max_bytes) and job.done in (job.border, len(job.prompt))
            # alone and without the room that softmax layers leave for more, where it is kept
            job.cache, job.shared = take(cache, i) if keep or len(jobs) > 1 else cache, False
            job.logits = logits[i : i + 1].clone()
            if job.wants_experts:
                job.routed_experts.append(out.routed_experts[i, T - len(piece) :].to(torch.int16))
            if job.versions[-1:] != (version,):
                job.versions += (version,)
            if keep and job.versions == (version,):
                self.prefixes.insert(job.prompt[: job.done], job.snapshot())

    def _cache_for(self, jobs: Sequence[Prefill]) -> HybridCache:
        """A cache that may be written into."""
        if len(jobs) == 1 and not jobs[0].shared:
            return jobs[0].cache
        if not jobs[0].done:
            return empty_cache(self.model)
        return join([job.cache for job in jobs])
