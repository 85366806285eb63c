"""Who is next, and what one request has become so far.

Memory is reserved at admission. States of lightning layers are constant, so `max_batch` bounds them; a batch
of n sequences holds n times its longest in softmax positions, so a request is let in while

    n * max(prompt + max_new_tokens) <= max_tokens

and no request that runs can run out of it. Nobody overtakes the first in the queue, so everyone's turn comes.
"""

import heapq
import random
from collections.abc import Collection
from dataclasses import dataclass, field

from torch import Tensor

from .requests import GenerationParams, QueueFullError, Request, Update
from .sampling import Choice
from .text_stream import TextStream


@dataclass(eq=False)
class Running:
    """A request under way.

    Args:
        end_tokens: the model's or the request's own.
        random: its own random numbers, one for each token.
        text: turns its tokens into text; None without a tokenizer.
        stream_text: text comes with every token, not all at the end.
        confident: the last so many tokens had a probability above the repetition threshold.
        routed_experts: (positions, L, A) each.
    """

    id: int
    request: Request
    end_tokens: frozenset[int]
    random: random.Random
    text: TextStream | None = None
    stream_text: bool = True
    tokens: list[int] = field(default_factory=list)
    versions: tuple[int, ...] = ()
    cached_prompt_tokens: int = 0
    confident: int = 0
    routed_experts: list[Tensor] = field(default_factory=list)

    @property
    def sampling(self) -> GenerationParams:
        return self.request.sampling

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.tokens)

    @property
    def longest(self) -> int:
        """Positions that it may come to."""
        return len(self.request.prompt) + self.sampling.max_new_tokens

    def seen(self) -> list[int]:
        return [*self.request.prompt, *self.tokens] if self.sampling.repetition_penalty != 1 else []

    def update(self) -> Update:
        return Update(
            self.id,
            weights_versions=self.versions,
            prompt_tokens=len(self.request.prompt),
            cached_prompt_tokens=self.cached_prompt_tokens,
        )

    def accept(self, choice: Choice) -> Update:
        """Enter the chosen token; the update says whether it was the last one."""
        update = self.update()
        if choice.token is None:
            update.finish_reason = "error"
            return update
        self.tokens.append(choice.token)
        update.tokens, update.log_probs = [choice.token], [choice.log_prob]
        update.sampled_log_probs = [choice.sampled_log_prob]
        update.top_log_probs = [choice.top] if self.sampling.top_log_probs else []
        if self.text is not None and self.stream_text:
            update.text = self.text.put(choice.token)
        self.confident = self.confident + 1 if choice.probability > self.sampling.repetition_threshold else 0
        if choice.token in self.end_tokens:
            update.finish_reason = "end"
        elif choice.token in self.sampling.stop_token_ids or self.text is not None and self.text.stopped:
            update.finish_reason = "stop"
        elif self.sampling.repetition_run and self.confident >= self.sampling.repetition_run:
            update.finish_reason = "repetition"
        elif len(self.tokens) >= self.sampling.max_new_tokens:
            update.finish_reason = "length"
        if update.finish_reason and self.text is not None:
            update.text += self.text.end() if self.stream_text else self.text.whole(self.tokens)
        return update


class Scheduler:
    """The queue: higher priority first, then in order of arrival."""

    def __init__(self, *, max_batch: int, max_tokens: int, max_queue: int | None):
        limits = {"max_batch": max_batch, "max_tokens": max_tokens, "max_queue": max_queue}
        for name, value in limits.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.max_batch, self.max_tokens, self.max_queue = max_batch, max_tokens, max_queue
        self._queue: list[tuple[int, int, Running]] = []

    def __len__(self) -> int:
        return len(self._queue)

    def is_full(self) -> bool:
        return self.max_queue is not None and len(self) >= self.max_queue

    def add(self, new: Running) -> None:
        if new.longest > self.max_tokens:
            raise ValueError(
                f"the prompt has {len(new.request.prompt)} tokens and max_new_tokens is "
                f"{new.sampling.max_new_tokens}, together more than the engine's max_tokens of "
                f"{self.max_tokens}; lower max_new_tokens or build the engine with a larger max_tokens"
            )
        if self.is_full():
            raise QueueFullError(f"{len(self)} requests wait, max_queue is {self.max_queue}; try again later")
        heapq.heappush(self._queue, (-new.request.priority, new.id, new))

    def next(self, admitted: Collection[Running]) -> Running | None:
        """The next request if it fits beside those already admitted; it leaves the queue."""
        if not self._queue or len(admitted) >= self.max_batch:
            return None
        longest = max(one.longest for one in [*admitted, self._queue[0][-1]])
        if (len(admitted) + 1) * longest > self.max_tokens:
            return None
        return heapq.heappop(self._queue)[-1]

    def cancel(self, request_id: int) -> Running | None:
        found = next((entry for entry in self._queue if entry[1] == request_id), None)
        if found is None:
            return None
        self._queue.remove(found)
        heapq.heapify(self._queue)
        return found[-1]
