"""From logits to tokens, for a batch whose requests all have settings of their own.

    scores  = logits, penalised and without forbidden tokens, / temperature
    kept    = top-k, then top-p of what is left, then min-p
    token   = the first whose cumulative probability exceeds u, one uniform number of the request's own

A token depends on its request's logits, settings and u alone, so not on the batch around it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .requests import GenerationParams


class Choice(NamedTuple):
    """The next token of one request; `probability` is the model's own, at temperature 1.

    token is None where the logits are not finite.
    """

    token: int | None
    log_prob: float
    sampled_log_prob: float
    probability: float
    top: list[tuple[int, float]]


def choose(
    logits: Tensor,
    params: Sequence[GenerationParams],
    uniforms: Sequence[float],
    seen: Sequence[Sequence[int]],
) -> list[Choice]:
    """The next token of each of B requests.

    Args:
        logits: (B, V) float32.
        uniforms: a number from [0, 1) for each.
        seen: the tokens that each request's repetition penalty is for; read only where there is one.
    """
    finite = logits.isfinite().all(-1)
    logits = logits.masked_fill(~finite[:, None], 0.0)
    temperature = logits.new_tensor([p.divisor for p in params])[:, None]
    log_probs = (logits / temperature).log_softmax(-1)
    sampled = log_probs
    if any(_changes_the_distribution(p) for p in params):
        sampled = _filtered(_penalised(logits, params, seen) / temperature, params).log_softmax(-1)
    greedy = torch.tensor([p.is_greedy for p in params], device=logits.device)
    tokens = sampled.argmax(-1)
    if not all(p.is_greedy for p in params):
        tokens = torch.where(greedy, tokens, _drawn(sampled, uniforms))
    tokens = tokens[:, None]
    of_token = [log_probs.gather(-1, tokens), sampled.gather(-1, tokens).masked_fill(greedy[:, None], 0.0)]
    if any(p.repetition_run for p in params):
        of_token.append(logits.log_softmax(-1).gather(-1, tokens).exp())
    else:
        of_token.append(torch.zeros_like(of_token[0]))
    packed = torch.cat([tokens.double(), finite[:, None].double(), *(x.double() for x in of_token)], dim=1)
    tops = _top(log_probs, params)
    return [
        Choice(int(token) if sound else None, log_prob, sampled_log_prob, probability, top)
        for (token, sound, log_prob, sampled_log_prob, probability), top in zip(
            packed.tolist(), tops, strict=True
        )
    ]


def _changes_the_distribution(p: GenerationParams) -> bool:
    return bool(p.forbidden_tokens or p.repetition_penalty != 1 or p.top_k or p.top_p < 1 or p.min_p)


def _penalised(logits: Tensor, params: Sequence[GenerationParams], seen: Sequence[Sequence[int]]) -> Tensor:
    logits = logits.clone()
    for i, p in enumerate(params):
        if p.repetition_penalty != 1:
            ids = torch.tensor(sorted(set(seen[i])), device=logits.device)
            old = logits[i, ids]
            logits[i, ids] = torch.where(old > 0, old / p.repetition_penalty, old * p.repetition_penalty)
        if p.forbidden_tokens:
            logits[i, torch.tensor(p.forbidden_tokens, device=logits.device)] = -math.inf
    return logits


def _filtered(scores: Tensor, params: Sequence[GenerationParams]) -> Tensor:
    """Scores (B, V) with -inf at what top-k, top-p and min-p leave out; the likeliest token always stays."""
    if not any(p.top_k or p.top_p < 1 or p.min_p for p in params):
        return scores
    V = scores.shape[-1]
    top_k = torch.tensor([p.top_k or V for p in params], device=scores.device)[:, None]
    top_p, min_p = (
        scores.new_tensor([getattr(p, name) for p in params], dtype=torch.float64)[:, None]
        for name in ("top_p", "min_p")
    )
    ordered, index = scores.sort(dim=-1, descending=True, stable=True)
    left_out = torch.arange(V, device=scores.device) >= top_k
    p = ordered.masked_fill(left_out, -math.inf).double().softmax(-1)
    left_out |= (p.cumsum(-1) - p >= top_p) & (top_p < 1) | (p < min_p * p[:, :1])
    left_out[:, 0] = False
    return scores.masked_fill(torch.zeros_like(left_out).scatter(-1, index, left_out), -math.inf)


def _drawn(log_probs: Tensor, uniforms: Sequence[float]) -> Tensor:
    """(B,) tokens by inverse cumulative probability, in float64 and in the order of the vocabulary."""
    cumulative = log_probs.double().exp().cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    u = torch.tensor(uniforms, dtype=torch.float64, device=log_probs.device)[:, None]
    token = torch.searchsorted(cumulative, u * total, right=True)
    # rounding may bring u * total up to the total: then the last token with a probability
    return torch.minimum(token, torch.searchsorted(cumulative, total))[:, 0]


def _top(log_probs: Tensor, params: Sequence[GenerationParams]) -> list[list[tuple[int, float]]]:
    most = min(max(p.top_log_probs for p in params), log_probs.shape[-1])
    if not most:
        return [[] for _ in params]
    values, ids = (x.tolist() for x in log_probs.topk(most, dim=-1))
    return [list(zip(ids[i], values[i], strict=True))[: p.top_log_probs] for i, p in enumerate(params)]
