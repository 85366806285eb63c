"""Rollouts: G responses to each prompt, with what training needs to know about how they came about.

The decoding loop is written out because it records three things as it goes: the log-probability of every
chosen token under the model's own full distribution at the sampling temperature (never a truncated one), why
the response ended, and, on request, which experts every position went to.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..compat import CACHE_NAME
from ..generation import RepetitionStop
from .batches import Response


@dataclass(frozen=True)
class Sampling:
    """How to draw a response.

    Args:
        end_tokens: any of these ends a response and is its last token.
        pad_token: fills finished rows; never drawn unless it is an end token (a policy that samples its
            padding trains on an embedding that nothing else trains).
        max_new_tokens: the output window.
        temperature: what the logits are divided by, in drawing and in the recorded log-probabilities.
        greedy: take the most probable token instead of drawing one.
        repetition_run: end a response after so many tokens in a row with probability above
            repetition_threshold (report, section 3.2: 3,000 and 0.99); None for no such rule.
        record_routing: keep the experts of every position.
    """

    end_tokens: tuple[int, ...]
    pad_token: int
    max_new_tokens: int
    temperature: float = 1.0
    greedy: bool = False
    repetition_run: int | None = None
    repetition_threshold: float = 0.99
    record_routing: bool = False

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
    sampling: Sampling,
    *,
    copies: int = 1,
    generator: torch.Generator | None = None,
) -> list[Response]:
    """`copies` responses to each prompt, neighbours in the result; a prompt's place in the list is their
    group.

    Raises:
        ValueError: an empty prompt.
        FloatingPointError: logits that are not finite, with prompt and step.
    """
    rows = [prompt for prompt in prompts for _ in range(copies)]
    if not rows:
        return []
    if empty := [i for i, prompt in enumerate(prompts) if not prompt]:
        raise ValueError(f"prompts {empty[:10]} are empty: the first token needs one before it")
    training = model.training
    model.eval()
    try:
        recorded = _decode(model, rows, sampling, generator)
    finally:
        model.train(training)
    return [_response(i, rows[i], i // copies, sampling, recorded) for i in range(len(rows))]


class _Endings:
    """Which rows still run, and when and why the others ended."""

    def __init__(self, rows: int, sampling: Sampling, device: torch.device):
        self.running = torch.ones(rows, dtype=torch.bool, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.reasons = ["length"] * rows
        self._end_tokens = torch.tensor(sampling.end_tokens, device=device)
        self._stop = None
        if sampling.repetition_run is not None:
            self._stop = RepetitionStop(run=sampling.repetition_run, threshold=sampling.repetition_threshold)

    def note(self, token: Tensor, logits: Tensor) -> None:
        ended = self.running & torch.isin(token, self._end_tokens)
        repeated = torch.zeros_like(ended)
        if self._stop is not None:
            probability = logits.softmax(-1).gather(-1, token[:, None])[:, 0]
            repeated = self._stop.count(probability * self.running) & self.running & ~ended
        self.lengths += self.running
        for reason, which in (("end", ended), ("repetition", repeated)):
            for i in which.nonzero().flatten().tolist():
                self.reasons[i] = reason
        self.running = self.running & ~ended & ~repeated


@dataclass(frozen=True)
class _Recorded:
    """What the loop keeps of all rows: a column for each step."""

    tokens: Tensor  # (B, steps)
    log_probs: Tensor  # (B, steps)
    routing: Tensor | None  # (B, P + steps - 1, L, A)
    endings: _Endings
    padding: list[int]  # columns on the left of each prompt


def _decode(
    model: PreTrainedModel, rows: list[list[int]], sampling: Sampling, generator: torch.Generator | None
) -> _Recorded:
    device = next(model.parameters()).device
    B, P = len(rows), max(map(len, rows))
    padding = [P - len(prompt) for prompt in rows]
    filled = [[sampling.pad_token] * pad + prompt for pad, prompt in zip(padding, rows, strict=True)]
    step_ids = torch.tensor(filled, device=device)  # (B, P), then (B, 1)
    mask = torch.tensor([[0] * pad + [1] * (P - pad) for pad in padding], device=device)
    endings = _Endings(B, sampling, device)
    tokens, log_probs, routing = [], [], []
    cache = None
    for step in range(sampling.max_new_tokens):
        out = model(
            input_ids=step_ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            output_router_logits=sampling.record_routing,
        )
        cache = out[CACHE_NAME]
        if sampling.record_routing:
            routing.append(_chosen_experts(out.router_logits, B, model.config.num_experts_per_tok))
        logits = out.logits[:, -1].float()
        _check_logits(logits, step)
        token = _choose(logits, sampling, generator)  # (B,)
        at_temperature = (logits / sampling.temperature).log_softmax(-1)
        log_probs.append(at_temperature.gather(-1, token[:, None])[:, 0])
        # A finished row goes on with padding, and nobody looks at it again.
        token = torch.where(endings.running, token, sampling.pad_token)
        tokens.append(token)
        endings.note(token, logits)
        if not endings.running.any():
            break
        step_ids, mask = token[:, None], torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return _Recorded(
        torch.stack(tokens, 1).cpu(),
        torch.stack(log_probs, 1).cpu(),
        torch.cat(routing, 1).cpu() if routing else None,
        endings,
        padding,
    )


def _response(i: int, prompt: list[int], group: int, sampling: Sampling, recorded: _Recorded) -> Response:
    length, pad = int(recorded.endings.lengths[i]), recorded.padding[i]
    routing = recorded.routing
    return Response(
        prompt=list(prompt),
        tokens=recorded.tokens[i, :length].tolist(),
        log_probs=recorded.log_probs[i, :length].tolist(),
        finish=recorded.endings.reasons[i],
        temperature=sampling.temperature,
        group=group,
        routing=None if routing is None else routing[i, pad : pad + len(prompt) + length - 1],
    )


def _choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    if sampling.pad_token not in sampling.end_tokens:
        logits = logits.clone()
        logits[:, sampling.pad_token] = -torch.inf
    if sampling.greedy:
        return logits.argmax(-1)
    return torch.multinomial((logits / sampling.temperature).softmax(-1), 1, generator=generator)[:, 0]


def _chosen_experts(router_logits: tuple[Tensor, ...], B: int, A: int) -> Tensor:
    """(B, positions, L, A) int16 from L tensors (B * positions, E), by the router's own rule."""
    chosen = torch.stack([logits.float().softmax(-1).topk(A, dim=-1)[1] for logits in router_logits], dim=1)
    N, L, A = chosen.shape
    return chosen.view(B, N // B, L, A).to(torch.int16)


def _check_logits(logits: Tensor, step: int) -> None:
    bad = (~logits.isfinite().all(-1)).nonzero().flatten().tolist()
    if bad:
        raise FloatingPointError(f"logits are not finite in rollout rows {bad[:10]} at new token {step}")
