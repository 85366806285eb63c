"""Rollouts: G responses to each prompt, with what training needs to know about how they were drawn.

The decoding loop is written out because it records three things: the log-probability of every chosen token
under the model's full distribution at the sampling temperature (never a truncated one), why the response
ended, and, on request, which experts every position went to.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..compat import CACHE_NAME
from ..generation import RepetitionStop
from .batches import Response


@dataclass(frozen=True)
class SamplingParams:
    """How to draw a response.

    Args:
        end_tokens: any of these ends a response and is its last token.
        pad_token: pads prompts on the left; never drawn unless it is an end token (a policy that samples
            its padding trains on an embedding that nothing else trains).
        max_new_tokens: the output window.
        temperature: what the logits are divided by, in drawing and in the recorded log-probabilities.
        greedy: take the most probable token instead of drawing one.
        repetition_run: end a response after so many tokens in a row with probability above
            repetition_threshold (report, section 3.2: 3,000 and 0.99); None for no such rule.
        output_routed_experts: keep the experts of every position.
    """

    end_tokens: tuple[int, ...]
    pad_token: int
    max_new_tokens: int
    temperature: float = 1.0
    greedy: bool = False
    repetition_run: int | None = None
    repetition_threshold: float = 0.99
    output_routed_experts: bool = False

    def __post_init__(self) -> None:
        if not self.end_tokens:
            raise ValueError("end_tokens is empty: no response could end before its window")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be finite and above 0, got {self.temperature}; "
                "greedy=True takes the likeliest token"
            )


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: list[list[int]],
    sampling: SamplingParams,
    *,
    num_generations: int = 1,
    generator: torch.Generator | None = None,
) -> list[Response]:
    """`num_generations` responses to each prompt, neighbours in the result; a prompt's index is their group.

    Raises:
        ValueError: an empty prompt, less than one generation, tokens that the model does not have.
        FloatingPointError: logits that are not finite, with prompt and step.
    """
    if not prompts:
        return []
    if empty := [i for i, prompt in enumerate(prompts) if not prompt]:
        raise ValueError(f"prompts {empty[:10]} are empty: the first token needs one before it")
    if num_generations < 1:
        raise ValueError(f"num_generations must be at least 1, got {num_generations}")
    V = model.config.vocab_size
    given = {sampling.pad_token, *sampling.end_tokens, *(token for prompt in prompts for token in prompt)}
    if foreign := sorted(token for token in given if not 0 <= token < V):
        raise ValueError(
            f"tokens {foreign[:10]} of the prompts, pad_token or end_tokens are outside the vocabulary of {V}"
        )
    training = model.training
    model.eval()
    try:
        recorder = _decode(model, prompts, num_generations, sampling, generator)
    finally:
        model.train(training)
    return recorder.responses(prompts, num_generations)


def _decode(
    model: PreTrainedModel,
    prompts: list[list[int]],
    num_generations: int,
    sampling: SamplingParams,
    generator: torch.Generator | None,
) -> "_Recorder":
    device = next(model.parameters()).device
    P = max(map(len, prompts))
    padding = [P - len(prompt) for prompt in prompts]
    filled = [[sampling.pad_token] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
    step_ids = torch.tensor(filled, device=device)  # (prompts, P), then (active, 1)
    mask = torch.tensor([[0] * pad + [1] * (P - pad) for pad in padding], device=device)
    recorder = _Recorder(len(prompts) * num_generations, sampling, device)
    cache = None
    for step in range(sampling.max_new_tokens):
        out = model(
            input_ids=step_ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            output_routed_experts=sampling.output_routed_experts,
        )
        cache, logits = out[CACHE_NAME], out.logits[:, -1].float()
        experts = out.routed_experts.to(torch.int16) if sampling.output_routed_experts else None
        if step == 0 and num_generations > 1:
            # a prompt is computed once for all its responses
            cache.batch_repeat_interleave(num_generations)
            logits, mask = (x.repeat_interleave(num_generations, dim=0) for x in (logits, mask))
            experts = None if experts is None else experts.repeat_interleave(num_generations, dim=0)
        _check_logits(logits, recorder, num_generations, step)
        token = _choose(logits, sampling, generator)  # (active,)
        running = recorder.add(token, logits, experts)
        if not running.any():
            break
        if 2 * running.sum() <= len(running):
            # half of the responses have ended: remove them from the cache
            left = running.nonzero()[:, 0]
            cache.batch_select_indices(left)
            mask, token = mask[left], token[left]
            recorder.active = recorder.active[left]
        step_ids, mask = token[:, None], torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return recorder


class _Recorder:
    """What the loop records of all B responses at each step, while only the active ones are computed."""

    def __init__(self, B: int, sampling: SamplingParams, device: torch.device):
        self.sampling = sampling
        # Responses that the cache holds, then those that have not ended.
        self.active = torch.arange(B, device=device)
        self.running = torch.ones(B, dtype=torch.bool, device=device)
        self.lengths = torch.zeros(B, dtype=torch.long, device=device)
        self.finish_reasons = ["length"] * B
        self.tokens: list[Tensor] = []  # (B,) each
        self.log_probs: list[Tensor] = []  # (B,) each
        self.routed_experts: list[Tensor] = []  # (B, positions, L, A) each
        self._end_tokens = torch.tensor(sampling.end_tokens, device=device)
        self._stop = None
        if sampling.repetition_run is not None:
            self._stop = RepetitionStop(run=sampling.repetition_run, threshold=sampling.repetition_threshold)

    def add(self, token: Tensor, logits: Tensor, experts: Tensor | None) -> Tensor:
        """Record a step of the active responses; returns which of them have not ended."""
        log_probs = (logits / self.sampling.temperature).log_softmax(-1).gather(-1, token[:, None])[:, 0]
        self.tokens.append(self._scattered(token))
        self.log_probs.append(self._scattered(log_probs))
        if experts is not None:
            self.routed_experts.append(self._scattered(experts))
        self.lengths += self.running
        ended = self.running & torch.isin(self.tokens[-1], self._end_tokens)
        repeated = torch.zeros_like(ended)
        if self._stop is not None:
            probability = self._scattered(logits.softmax(-1).gather(-1, token[:, None])[:, 0])
            repeated = self._stop.count(probability * self.running) & self.running & ~ended
        for reason, which in (("end", ended), ("repetition", repeated)):
            for i in which.nonzero().flatten().tolist():
                self.finish_reasons[i] = reason
        self.running = self.running & ~ended & ~repeated
        return self.running[self.active]

    def responses(self, prompts: list[list[int]], num_generations: int) -> list[Response]:
        tokens, log_probs = (torch.stack(x, 1).cpu() for x in (self.tokens, self.log_probs))  # (B, steps)
        experts = torch.cat(self.routed_experts, 1).cpu() if self.routed_experts else None
        P, found = max(map(len, prompts)), []
        for i, length in enumerate(self.lengths.tolist()):
            prompt = prompts[i // num_generations]
            ran = slice(P - len(prompt), P + length - 1)
            found.append(
                Response(
                    prompt=list(prompt),
                    tokens=tokens[i, :length],
                    log_probs=log_probs[i, :length],
                    finish_reason=self.finish_reasons[i],
                    temperature=self.sampling.temperature,
                    group=i // num_generations,
                    routed_experts=None if experts is None else experts[i, ran],
                )
            )
        return found

    def _scattered(self, values: Tensor) -> Tensor:
        """(B, ...) from (active, ...), zeros elsewhere."""
        full = values.new_zeros((len(self.running), *values.shape[1:]))
        return full.index_copy(0, self.active, values)


def _choose(logits: Tensor, sampling: SamplingParams, generator: torch.Generator | None) -> Tensor:
    if sampling.pad_token not in sampling.end_tokens:
        logits = logits.clone()
        logits[:, sampling.pad_token] = -torch.inf
    if sampling.greedy:
        return logits.argmax(-1)
    return torch.multinomial((logits / sampling.temperature).softmax(-1), 1, generator=generator)[:, 0]


def _check_logits(logits: Tensor, recorder: _Recorder, num_generations: int, step: int) -> None:
    """Those of responses that have not ended; what follows an end token is not used."""
    bad = ~logits.isfinite().all(-1)
    running = recorder.running[recorder.active]
    if failed := recorder.active[bad & running].tolist():
        prompts = sorted({i // num_generations for i in failed})
        raise FloatingPointError(
            f"logits are not finite at new token {step} of responses {failed[:10]}, to prompts {prompts[:10]}"
        )
    logits[bad] = 0.0
