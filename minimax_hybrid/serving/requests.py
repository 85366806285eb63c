"""What goes into the engine and what comes out of it: plain values.

Request (prompt and GenerationParams) -> Update, one for each step -> Result, all of them together
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

FinishReason = Literal["end", "stop", "length", "repetition", "cancelled", "error"]


class QueueFullError(RuntimeError):
    """The engine's queue is full; submit the request again later."""


@dataclass(frozen=True)
class GenerationParams:
    """How the tokens of one request are chosen, and when it ends.

    Args:
        temperature: divides the logits; 0 or None is `greedy` at temperature 1.
        top_k: draw from the k likeliest tokens only; 0 for all.
        top_p: draw from the smallest set of tokens with this probability in all.
        min_p: draw from tokens with at least this share of the likeliest one's probability.
        repetition_penalty: divides positive logits of tokens already seen, multiplies negative ones.
        seed: of the request's own random numbers; drawn from torch's global generator if None.
        max_new_tokens: the output window; then the reason is "length".
        stop: texts that end the answer ("stop"); the returned text ends before them.
        stop_token_ids: tokens that end it ("stop"), beside the end tokens.
        greedy: take the likeliest token; log-probabilities are still at the temperature.
        end_tokens: tokens that end the answer ("end"); the model's own if None.
        forbidden_tokens: never chosen. Log-probabilities are of the distribution with them.
        repetition_run: end ("repetition") after so many tokens in a row that each had a probability above
            `repetition_threshold` (M1 report, section 3.2: 3,000 and 0.99); None for no such rule.
        top_log_probs: return the log-probabilities of so many likeliest tokens at every step.
        output_routed_experts: return the experts of every position.
    """

    temperature: float | None = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    greedy: bool = False
    end_tokens: tuple[int, ...] | None = None
    forbidden_tokens: tuple[int, ...] = ()
    repetition_run: int | None = None
    repetition_threshold: float = 0.99
    top_log_probs: int = 0
    output_routed_experts: bool = False

    def __post_init__(self) -> None:
        rules = [
            ("temperature", "finite and at least 0", 0 <= (self.temperature or 0.0) < math.inf),
            ("top_k", "at least 0 (0 keeps all tokens)", self.top_k >= 0),
            ("top_p", "above 0 and at most 1 (1 keeps all tokens)", 0 < self.top_p <= 1),
            ("min_p", "at least 0 and below 1 (0 keeps all tokens)", 0 <= self.min_p < 1),
            ("repetition_penalty", "finite and above 0 (1 is none)", 0 < self.repetition_penalty < math.inf),
            ("max_new_tokens", "at least 1", self.max_new_tokens >= 1),
            ("stop", "texts of at least one character", all(self.stop) and not isinstance(self.stop, str)),
            ("repetition_run", "at least 1, or None", self.repetition_run is None or self.repetition_run > 0),
            ("repetition_threshold", "between 0 and 1", 0 < self.repetition_threshold < 1),
            ("top_log_probs", "at least 0", self.top_log_probs >= 0),
            ("seed", "from 0 to 2**64 - 1, or None", self.seed is None or 0 <= self.seed < 2**64),
        ]
        for name, rule, kept in rules:
            if not kept:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {rule}")

    @property
    def is_greedy(self) -> bool:
        return self.greedy or not self.temperature

    @property
    def divisor(self) -> float:
        """What the logits are divided by."""
        return self.temperature or 1.0


@dataclass(frozen=True)
class Request:
    """A prompt to continue. n copies are n requests; they share the computation of their prompt.

    Args:
        prompt: token ids, at least one.
        priority: a higher one leaves the queue first; equal ones in order of arrival.
    """

    prompt: list[int]
    sampling: GenerationParams = field(default_factory=GenerationParams)
    priority: int = 0


@dataclass
class Update:
    """What a step added to a request. `Result` is the sum of all.

    Args:
        tokens: new token ids; the end or stop token is the last one.
        text: new text, without special tokens; empty without a tokenizer.
        log_probs: of each token, under the full vocabulary at the temperature, from the float32 head: what
            `model.log_probs` gives.
        sampled_log_probs: of each token, under the distribution it was drawn from, after all filters.
        top_log_probs: for each token, ids and log-probabilities of the likeliest, if asked for.
        finish_reason: None while the request runs. "end": an end token; "stop": a stop text or token;
            "length": max_new_tokens; "error": logits that are not finite.
        weights_versions: versions of the weights that computed it so far, in order; more than one after
            `update_weights`.
        cached_prompt_tokens: how many of `prompt_tokens` were reused and not computed.
    """

    request_id: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    log_probs: list[float] = field(default_factory=list)
    sampled_log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    weights_versions: tuple[int, ...] = ()
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0


@dataclass
class Result(Update):
    """All of a request.

    Args:
        routed_experts: (positions, L, A) int16 of prompt and answer without the last token, which was never
            run; only if asked for.
    """

    routed_experts: Tensor | None = None

    def add(self, update: Update) -> None:
        self.tokens += update.tokens
        self.text += update.text
        self.log_probs += update.log_probs
        self.sampled_log_probs += update.sampled_log_probs
        self.top_log_probs += update.top_log_probs
        self.finish_reason = update.finish_reason
        self.weights_versions = update.weights_versions
        self.prompt_tokens = update.prompt_tokens
        self.cached_prompt_tokens = update.cached_prompt_tokens


@dataclass(frozen=True)
class Stats:
    """What the engine holds and has done.

    Args:
        queue, prefilling, running: requests.
        prefix_queries: requests admitted so far; prefix_hits: those of which a part was reused.
        prompt_tokens, cached_prompt_tokens: of all admitted requests, and how many of them were reused.
        prefix_bytes: of the snapshots kept for reuse.
        cache_bytes: of running requests' keys, values and states.
        weights_version: 0 at first, one more with each `update_weights`.
    """

    queue: int
    prefilling: int
    running: int
    finished: int
    cancelled: int
    steps: int
    tokens_generated: int
    prompt_tokens: int
    cached_prompt_tokens: int
    prefix_queries: int
    prefix_hits: int
    prefix_bytes: int
    cache_bytes: int
    weights_version: int

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens that were reused."""
        return self.cached_prompt_tokens / max(self.prompt_tokens, 1)


def seed_of(sampling: GenerationParams) -> int:
    """The request's own seed, or one from torch's global generator."""
    return int(torch.randint(2**62, ())) if sampling.seed is None else sampling.seed


def check(request: Request, *, vocab_size: int) -> None:
    """Raise a ValueError for a request that no model with this vocabulary can serve."""
    sampling = request.sampling
    if not request.prompt:
        raise ValueError("the prompt is empty: the first token needs one before it")
    given = {*request.prompt, *sampling.forbidden_tokens}
    if foreign := sorted(token for token in given if not 0 <= token < vocab_size):
        raise ValueError(
            f"tokens {foreign[:10]} are outside the vocabulary of {vocab_size}; check the tokenizer"
        )
    if len(set(sampling.forbidden_tokens)) >= vocab_size:
        raise ValueError("forbidden_tokens are the whole vocabulary; leave one to choose")
