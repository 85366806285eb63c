"""What the log says about a batch and an optimiser step, and where a non-finite gradient came from."""

import math
from collections import Counter

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .advantages import length_bias
from .batches import Response, batch_log_probs, collate, lengths_of
from .grading import Graded
from .objective import Objective, policy_metrics


def batch_metrics(drawn: Graded) -> dict[str, float]:
    """Reward, lengths, finish reasons, perplexity of the generations, and whether length buys reward."""
    lengths = lengths_of(drawn.responses)
    counts = Counter(response.finish_reason for response in drawn.responses)
    values: dict[str, float] = {
        "responses": len(lengths),
        "verifier_failures": drawn.failures,
        **{f"finish_{reason}": counts[reason] for reason in ("end", "length", "repetition")},
    }
    if not drawn.responses:
        return values
    log_probs = torch.cat([response.log_probs for response in drawn.responses])
    return values | {
        "reward": float(drawn.rewards.mean()),
        "length": float(lengths.float().mean()),
        "length_p99": float(lengths.sort().values[math.ceil(0.99 * len(lengths)) - 1]),
        "perplexity": float((-log_probs.mean()).exp()),
        **length_bias(drawn.rewards, lengths, drawn.group_ids),
    }


def step_metrics(scored: dict[str, Tensor], objective: Objective, *, on_policy: bool) -> dict[str, float]:
    """The objective's metrics over a step's N response tokens, of which `scored` has (N,) tensors.

    `on_policy` adds how far training and rollout lie apart where they are the same policy.
    """
    one = {name: values[None] for name, values in scored.items()}  # (1, N) each
    log_probs, old, A = one["log_prob"], one["old_log_prob"], one["advantage"]
    mask = torch.ones_like(A, dtype=torch.bool)
    metrics = policy_metrics(
        log_probs, old, A, mask, objective, ref_log_probs=one.get("ref_log_prob"), entropy=one["entropy"]
    )
    if on_policy:
        metrics |= {f"rollout_{name}": value for name, value in agreement(log_probs, old, mask).items()}
    return metrics


@torch.no_grad()
def agreement(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far probabilities of training and rollout lie apart where mask is true (report, figure 3).

    Args:
        log_probs, old_log_probs, mask: (B, T), two records of the same tokens.

    Returns:
        `correlation`: Pearson's, of probabilities, as in the report; 1 if either has no spread and they are
        equal. `probability_mean` and `probability_max`: absolute difference of probabilities.
        `log_ratio_max`: largest absolute log-ratio, so that 0 is a ratio of 1 everywhere.
    """
    mask = mask.bool()
    new, old = log_probs[mask].double(), old_log_probs[mask].double()
    if len(new) == 0:
        return {"correlation": 1.0, "probability_mean": 0.0, "probability_max": 0.0, "log_ratio_max": 0.0}
    p_new, p_old = new.exp(), old.exp()
    difference = (p_new - p_old).abs()
    a, b = p_new - p_new.mean(), p_old - p_old.mean()
    scale = (a.square().sum() * b.square().sum()).sqrt()
    correlation = (a * b).sum() / scale if scale > 0 else torch.tensor(float(torch.equal(p_new, p_old)))
    return {
        "correlation": float(correlation),
        "probability_mean": float(difference.mean()),
        "probability_max": float(difference.max()),
        "log_ratio_max": float((new - old).abs().max()),
    }


class NonFiniteError(FloatingPointError):
    """A loss or gradient that is not finite. The step was not made."""


def locate_non_finite(
    model: PreTrainedModel, responses: list[Response], *, pad_token: int, replay_routing: bool
) -> str:
    """Parameters whose gradient is not finite, then the first token of a response that alone makes one so.

    Slow: one backward pass per token. The usual cause is a vector that is exactly zero: every norm above it
    multiplies the gradient by 1/sqrt(eps), which overflows float32 within a few layers while the loss looks
    healthy.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    bad = [name for name, p in parameters.items() if p.grad is not None and not p.grad.isfinite().all()]
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    where = f"parameters {', '.join(bad[:3])}{more}; " if bad else ""
    device = next(model.parameters()).device
    for number, response in enumerate(responses):
        batch = collate([response], pad_token=pad_token, device=device)
        log_probs, _ = batch_log_probs(model, batch, replay_routing=replay_routing)
        for t in batch.response_mask[0].nonzero().flatten().tolist():
            if _is_bad(log_probs[0, t], list(parameters.values())):
                ids = batch.input_ids[0, : t + 1].tolist()
                return (
                    f"{where}response {number}, token {t - len(response.prompt)} (id {ids[-1]}, predicted "
                    f"after id {ids[-2]}); ids up to there: {ids[-12:]}"
                )
    return f"{where}no single token does it alone; a sum overflows"


def _is_bad(value: Tensor, parameters: list[Tensor]) -> bool:
    if not value.isfinite():
        return True
    gradients = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    return any(g is not None and not g.isfinite().all() for g in gradients)
