"""What the log says about a batch of rollouts and about an optimiser step."""

import math
from collections import Counter

import torch
from torch import Tensor

from .advantages import length_bias
from .agreement import agreement
from .batches import Response
from .grading import Graded
from .objective import Objective, policy_loss


def batch_metrics(drawn: Graded) -> dict[str, float]:
    """Reward, lengths, reasons to end, perplexity of the generations, and whether length buys reward."""
    lengths = lengths_of(drawn.responses)
    counts = Counter(response.finish for response in drawn.responses)
    values: dict[str, float] = {
        "responses": len(lengths),
        "verifier_failures": drawn.failures,
        **{f"finish_{reason}": counts[reason] for reason in ("end", "length", "repetition")},
    }
    if not drawn.responses:
        return values
    log_probs = torch.tensor([x for response in drawn.responses for x in response.log_probs])
    return values | {
        "reward": float(drawn.rewards.mean()),
        "length": float(lengths.float().mean()),
        "length_p99": float(lengths.sort().values[math.ceil(0.99 * len(lengths)) - 1]),
        "perplexity": float((-log_probs.mean()).exp()),
        **length_bias(drawn.rewards, lengths, drawn.group_ids),
    }


def step_metrics(scored: dict[str, Tensor], objective: Objective, *, on_policy: bool) -> dict[str, float]:
    """The objective's metrics over a step's N response tokens, of which `scored` holds (N,) each.

    `on_policy` adds how far training and rollout lie apart where they are the same policy.
    """
    row = {name: values[None] for name, values in scored.items()}
    log_probs, old, A = row["log_prob"], row["old_log_prob"], row["advantage"]
    everything = torch.ones_like(A, dtype=torch.bool)
    extra = {"entropy": row["entropy"], "ref_log_probs": row.get("ref_log_prob")}
    _, metrics = policy_loss(log_probs, old, A, everything, objective, **extra)
    if on_policy:
        metrics |= {f"rollout_{k}": v for k, v in agreement(log_probs, old, everything).items()}
    return metrics


def lengths_of(responses: list[Response]) -> Tensor:
    return torch.tensor([len(response.tokens) for response in responses], dtype=torch.long)
