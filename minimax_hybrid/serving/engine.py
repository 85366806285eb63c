"""The rollout engine: many requests through one model, each with the answer that it would have alone.

    submit -> queue -> prefill (a piece a step) -> batch (a token a step) -> updates
                          |  ^                       |
                          v  |   snapshots           v
                       prefix cache  <---------------+

transformers' own continuous batching cannot carry this model: it pages the keys of attention layers, and has
no place for the state of a linear one.
"""

import random
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache import HybridCache
from .batch import Batch
from .prefill import Prefiller
from .prefix_cache import PrefixCache, Snapshot
from .requests import FinishReason, Request, Result, Stats, Update, check, seed_of
from .sampling import choose
from .scheduler import Running, Scheduler
from .text_stream import TextStream


class Engine:
    """Serves requests with one model, which it does not move, train or copy.

    Args:
        model: in evaluation mode.
        tokenizer: for texts; without it updates carry tokens only, and `stop` is refused.
        max_batch: most requests at once, waiting prompts included.
        max_tokens: most positions in softmax layers of all of them, padding included; their caches may have
            room for a quarter more.
        prefill_chunk: most prompt tokens computed in a step, between two tokens of those that run.
        max_queue: most requests that wait; None for no limit.
        prefix_cache_bytes: for snapshots of computed prompts; 0 for none.
        reuse_answers: keep a snapshot after each answer, too, for the next turn of a chat.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        max_batch: int = 32,
        max_tokens: int = 65536,
        prefill_chunk: int = 512,
        max_queue: int | None = None,
        prefix_cache_bytes: int = 2**28,
        reuse_answers: bool = True,
    ):
        if model.training:
            raise ValueError("the model is in training mode; call model.eval() first")
        self.model, self.tokenizer = model, tokenizer
        self.reuse_answers = reuse_answers
        self.scheduler = Scheduler(max_batch=max_batch, max_tokens=max_tokens, max_queue=max_queue)
        self.prefixes = PrefixCache(prefix_cache_bytes)
        self.prefiller = Prefiller(model, self.prefixes, chunk=prefill_chunk)
        self.batch = Batch(model, max_tokens=max_tokens)
        self.weights_version = 0
        self._end_tokens = _end_tokens(model, tokenizer)
        self._next_id = 0
        self._pending: list[Update] = []  # of requests that were cancelled or lost
        self._unclaimed: list[Update] = []  # came while `generate` or `stream` waited for others
        self._inboxes: dict[int, list[Update]] = {}  # of requests of `generate` and `stream`
        self._routed: dict[int, Tensor] = {}
        self._counts = dict.fromkeys(
            ("finished", "cancelled", "steps", "tokens_generated", "prompt_tokens", "cached_prompt_tokens",
             "prefix_queries", "prefix_hits"), 0,
        )  # fmt: skip

    def submit(self, request: Request) -> int:
        """Queue a request; returns its id, under which `step` reports.

        Raises:
            ValueError: a request that can never run.
            QueueFullError: `max_queue` requests wait already.
        """
        return self._submit(request, stream_text=True)

    def step(self) -> list[Update]:
        """One token for every request that runs, and a piece of the prompts that wait."""
        updates, self._unclaimed = self._unclaimed + self._advance(), []
        return updates

    def has_work(self) -> bool:
        """Whether `step` has anything to do or to report."""
        waiting = len(self.scheduler) or self.prefiller.jobs or self.batch.running
        return bool(waiting or self._pending or self._unclaimed)

    def cancel(self, request_id: int) -> bool:
        """Stop a request; its last update follows with the next step. False if it is not under way."""
        found = self.scheduler.cancel(request_id) or self.prefiller.cancel(request_id)
        if found is None:
            found = next((one for one in self.batch.running if one.id == request_id), None)
            if found is None:
                return False
            self.batch.remove(found)
        self._counts["cancelled"] += 1
        self._lose(found, "cancelled")
        return True

    def generate(self, requests: Sequence[Request]) -> list[Result]:
        """The results of these requests, in their order."""
        ids: list[int] = []
        try:
            for request in requests:
                while self.scheduler.is_full():  # a long list need not fit into the queue
                    self._deliver(self._advance())
                ids.append(self._submit(request, stream_text=False))
                self._inboxes[ids[-1]] = []
            results = {i: Result(i) for i in ids}
            while any(result.finish_reason is None for result in results.values()):
                self._deliver(self._advance())
                for i, result in results.items():
                    for update in self._inboxes[i]:
                        result.add(update)
                    self._inboxes[i].clear()
        finally:
            for i in ids:
                self._leave(i)
        for i, result in results.items():
            result.routed_experts = self._routed.pop(i, None)
        return [results[i] for i in ids]

    def stream(self, request: Request) -> Iterator[Update]:
        """The updates of one request as they come. A caller that stops listening cancels it."""
        request_id = self._submit(request, stream_text=True)
        inbox = self._inboxes[request_id] = []
        try:
            while True:
                self._deliver(self._advance())
                updates, inbox[:] = list(inbox), []
                yield from updates
                if updates and updates[-1].finish_reason:
                    return
        finally:
            self._leave(request_id)
            self._routed.pop(request_id, None)

    def update_weights(self, state_dict: Mapping[str, Tensor]) -> int:
        """Take over new weights between two steps; returns their version.

        Requests that run go on with what they have cached and are marked with both versions. What is kept
        for reuse is dropped.

        Raises:
            ValueError: names or shapes that are not the model's; the weights are unchanged.
        """
        own = self.model.state_dict()
        wrong = sorted(own.keys() ^ state_dict.keys()) or sorted(
            name for name, x in own.items() if x.shape != state_dict[name].shape
        )
        if wrong:
            raise ValueError(
                f"the weights differ from the model's in name or shape at {wrong[:5]}; "
                "give the state_dict() of a model of the same config"
            )
        self.model.load_state_dict(state_dict)
        self.prefixes.clear()
        self.weights_version += 1
        return self.weights_version

    def stats(self) -> Stats:
        return Stats(
            queue=len(self.scheduler),
            prefilling=len(self.prefiller.members),
            running=len(self.batch.running),
            prefix_bytes=self.prefixes.nbytes,
            cache_bytes=self.batch.nbytes,
            weights_version=self.weights_version,
            **self._counts,
        )

    def _submit(self, request: Request, *, stream_text: bool) -> int:
        sampling = request.sampling
        check(request, vocab_size=self.model.config.vocab_size)
        if sampling.stop and self.tokenizer is None:
            raise ValueError("stop texts need a tokenizer; give the engine one, or use stop_token_ids")
        text = None if self.tokenizer is None else TextStream(self.tokenizer, sampling.stop)
        new = Running(
            self._next_id,
            request,
            end_tokens=self._end_tokens if sampling.end_tokens is None else frozenset(sampling.end_tokens),
            random=random.Random(seed_of(sampling)),
            text=text,
            stream_text=stream_text or bool(sampling.stop),
        )
        self.scheduler.add(new)
        self._next_id += 1
        return new.id

    @torch.no_grad()
    def _advance(self) -> list[Update]:
        """A step. If it fails, the requests in it are lost (reason "error"), and the engine stays usable."""
        self._counts["steps"] += 1
        try:
            updates = self._decode()
            self._admit()
            updates += self._prefill()
        except BaseException:
            for one in [*self.batch.running, *self.prefiller.members]:
                self._lose(one, "error")
            self.batch.clear()
            self.prefiller.jobs.clear()
            raise
        pending, self._pending = self._pending, []
        return pending + updates

    def _admit(self) -> None:
        admitted = [*self.batch.running, *self.prefiller.members]
        while (new := self.scheduler.next(admitted)) is not None:
            admitted.append(new)
            self.prefiller.add(new, self.weights_version)
            self._counts["prefix_queries"] += 1
            self._counts["prefix_hits"] += bool(new.cached_prompt_tokens)
            self._counts["prompt_tokens"] += len(new.request.prompt)
            self._counts["cached_prompt_tokens"] += new.cached_prompt_tokens

    def _decode(self) -> list[Update]:
        running, logits = self.batch.step()
        updates = self._choose(running, logits)
        for one, update in zip(running, updates, strict=True):
            if update.finish_reason:
                self._keep_answer(one, update)
                self.batch.remove(one)
        return updates

    def _prefill(self) -> list[Update]:
        jobs = self.prefiller.step(self.weights_version)
        if not jobs:
            return []
        members, logits, caches = [], [], []
        for job in jobs:
            assert job.logits is not None
            for one in job.members:
                one.versions = job.versions
                one.routed_experts = list(job.routed_experts)
            members += job.members
            logits.append(job.logits.expand(len(job.members), -1))
            caches += [job.cache] * len(job.members)
        updates = self._choose(members, torch.cat(logits))
        self.batch.add(
            [
                (one, cache)
                for one, cache, update in zip(members, caches, updates, strict=True)
                if not update.finish_reason
            ]
        )
        return updates

    def _choose(self, running: Sequence[Running], logits: Tensor) -> list[Update]:
        """The next token of each, entered."""
        if not running:
            return []
        for one in running:
            if one.versions[-1:] != (self.weights_version,):
                one.versions += (self.weights_version,)
        choices = choose(
            logits,
            [one.sampling for one in running],
            [one.random.random() for one in running],
            [one.seen() for one in running],
        )
        updates = [one.accept(choice) for one, choice in zip(running, choices, strict=True)]
        self._counts["tokens_generated"] += sum(len(update.tokens) for update in updates)
        for one, update in zip(running, updates, strict=True):
            if update.finish_reason:
                self._counts["finished"] += 1
                if one.routed_experts and one.id in self._inboxes:
                    self._routed[one.id] = torch.cat(one.routed_experts).cpu()
        return updates

    def _keep_answer(self, one: Running, update: Update) -> None:
        fresh = one.versions == (self.weights_version,) and update.finish_reason != "error"
        if not (self.reuse_answers and self.prefixes.max_bytes and fresh):
            return
        experts = torch.cat(one.routed_experts) if one.routed_experts else None
        cached = [*one.request.prompt, *one.tokens[:-1]]
        cache: HybridCache = self.batch.cache_of(one)
        self.prefixes.insert(cached, Snapshot(len(cached), cache, routed_experts=experts))

    def _lose(self, one: Running, reason: FinishReason) -> None:
        update = one.update()
        update.finish_reason = reason
        self._pending.append(update)

    def _deliver(self, updates: Sequence[Update]) -> None:
        """To the inboxes of those who wait; the rest is for the next `step`."""
        for update in updates:
            self._inboxes.get(update.request_id, self._unclaimed).append(update)

    def _leave(self, request_id: int) -> None:
        """Wait for a request no longer; cancel it if it still runs."""
        self.cancel(request_id)
        self._inboxes.pop(request_id, None)
        self._pending = [update for update in self._pending if update.request_id != request_id]
        self._unclaimed = [update for update in self._unclaimed if update.request_id != request_id]


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    given = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if given is None and tokenizer is not None:
        given = tokenizer.eos_token_id
    return frozenset([] if given is None else [given] if isinstance(given, int) else given)
