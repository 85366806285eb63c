"""The policy objective of the MiniMax-M1 report (equations 4 to 7): CISPO and its relatives in one formula.

    J = sum over responses i and tokens t of  c[i] * w(r[i,t]) * M(r[i,t], A[i,t]) * A[i,t] * log pi[i,t]

`r = exp(log pi - log pi_old)` is the ratio, `w` its clipped value, `M` a token mask, `A` the advantage and
`c` one over the normaliser. `w`, `M` and `c` are constants to autograd, so the derivative of the loss by
`log pi[i,t]` is exactly `-c * w * M * A`.

Imports torch only, so that it can be lifted into any trainer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# exp of this is 4.9e8: beyond it a ratio says nothing more, and no sum of such ratios overflows float32.
LOG_RATIO_MAX = 20.0


@dataclass(frozen=True)
class Objective:
    """One setting of the formula. Every bound is on the ratio itself, not on its distance from 1.

    Args:
        ratio_min, ratio_max: `w = clip(r, ratio_min, ratio_max)`. The paper's 1 - eps_low and 1 + eps_high of
            equation 5: its eps_high = 4 is `ratio_max=5`. A clipped token keeps its gradient.
        trust_min, trust_max: `M = 0` where A > 0 and r > trust_max, or A < 0 and r < trust_min (equation 7).
            A token outside loses its gradient.
        sample_share: how much of the mean is over responses. 0 sums over tokens and divides by their number;
            1 takes each response's token mean, then the mean over responses; between, that share of the
            second plus the rest of the first. The report's section 5 says that it combined the two and gives
            no formula: this is ours.
        kl_coefficient: weight of the penalty `exp(d) - d - 1`, `d = log pi_ref - log pi` (equation 1's beta).
    """

    ratio_min: float = 0.0
    ratio_max: float = math.inf
    trust_min: float = 0.0
    trust_max: float = math.inf
    sample_share: float = 0.0
    kl_coefficient: float = 0.0

    def __post_init__(self) -> None:
        for low, high in ((self.ratio_min, self.ratio_max), (self.trust_min, self.trust_max)):
            if not 0.0 <= low <= 1.0 <= high:
                raise ValueError(
                    f"bounds are on the ratio itself, 0 <= min <= 1 <= max, got {low} and {high}; "
                    "the paper's 1 + epsilon is the maximum here"
                )
        if not 0.0 <= self.sample_share <= 1.0:
            raise ValueError(f"sample_share must lie in [0, 1], got {self.sample_share}")
        if not 0.0 <= self.kl_coefficient < math.inf:
            raise ValueError(f"kl_coefficient must be finite and at least 0, got {self.kl_coefficient}")


def CISPO(*, ratio_max: float, ratio_min: float = 0.0, sample_share: float = 0.0) -> Objective:
    """Clip the weight, keep every token (equations 4 and 5). `ratio_max` is 1 + the paper's eps_high.

    The report tunes eps_high alone and does not give its value, so there is no default. It sets no lower
    bound (eps_low "large"), and no KL term.
    """
    return Objective(ratio_min=ratio_min, ratio_max=ratio_max, sample_share=sample_share)


def DAPO(*, trust_min: float = 0.8, trust_max: float = 1.28, sample_share: float = 0.0) -> Objective:
    """PPO's trust region with the bound of Yu et al. 2025 (eps 0.2 and 0.28), mean over tokens."""
    return Objective(trust_min=trust_min, trust_max=trust_max, sample_share=sample_share)


def GRPO(
    *, trust_min: float = 0.8, trust_max: float = 1.2, sample_share: float = 1.0, kl_coefficient: float = 0.0
) -> Objective:
    """PPO's trust region (eps 0.2 both ways), mean over responses of the mean over tokens (equation 1)."""
    return Objective(
        trust_min=trust_min, trust_max=trust_max, sample_share=sample_share, kl_coefficient=kl_coefficient
    )


def REINFORCE(*, sample_share: float = 0.0) -> Objective:
    """The ratio as weight, no token dropped: CISPO without a bound. sample_share=1 is equation 3."""
    return Objective(sample_share=sample_share)


# by the names that a settings file uses
OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "cispo": CISPO,
    "dapo": DAPO,
    "grpo": GRPO,
    "reinforce": REINFORCE,
}


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    objective: Objective,
    *,
    group_ids: Tensor | None = None,
    normaliser: float | tuple[float, float] | None = None,
    ref_log_probs: Tensor | None = None,
) -> Tensor:
    """The loss to minimise, -J: a float32 scalar (float64 for float64 log_probs).

    Without `group_ids` or `normaliser` the sum is divided by the tokens (sample_share 0) or responses (1)
    that the mask leaves. What the mask hides cannot reach the loss or its gradient, not even as NaN. A
    response that is hidden whole is not counted, and a batch that is hidden whole gives 0 with a graph.

    Args:
        log_probs: (B, T) of the policy in training; the only input that receives a gradient.
        old_log_probs: (B, T) of the policy that sampled, at the same temperature, over the full vocabulary.
        advantages: (B,) or (B, T).
        mask: (B, T) bool or 0/1, true at response tokens.
        objective: CISPO(...), DAPO(), GRPO(), REINFORCE() or any Objective.
        group_ids: (B,) integers. Each group is divided by its own count, then the mean over groups is taken
            (equation 4).
        normaliser: divide by this number instead, with or without groups: the tokens (sample_share 0) or
            responses (1) of the whole batch, so that splitting it over micro-batches or ranks changes
            nothing. A mix of the two means needs both: (tokens, responses).
        ref_log_probs: (B, T) of the reference policy, for the KL term.

    Raises:
        ValueError: shapes that do not fit, a mask that is not 0/1, a normaliser that is not positive, a KL
            term without a reference.
    """
    terms = _token_terms(log_probs, old_log_probs, advantages, mask, objective)
    if group_ids is not None and group_ids.shape != log_probs.shape[:1]:
        raise ValueError(
            f"group_ids must be ({len(log_probs)},), one per response, got {tuple(group_ids.shape)}"
        )
    scale = _response_scale(terms.mask, objective.sample_share, group_ids, normaliser)
    scale = scale.to(terms.ratio.dtype)[:, None]  # (B, 1)
    kept_weight = terms.weight.masked_fill(terms.dropped, 0.0)
    loss = -(scale * kept_weight * terms.advantages * terms.log_probs).sum()
    if objective.kl_coefficient > 0:
        if ref_log_probs is None:
            raise ValueError(f"kl_coefficient is {objective.kl_coefficient}: give ref_log_probs too")
        loss = loss + objective.kl_coefficient * (scale * _kl_penalty(terms, ref_log_probs)).sum()
    return loss


@torch.no_grad()
def policy_metrics(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    objective: Objective,
    *,
    ref_log_probs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> dict[str, float]:
    """What to log about the tokens of a loss; arguments as in `policy_loss`, and entropy (B, T).

    Returns:
        `clipped_positive`: share of tokens with A > 0 that the bounds touch; `clipped_negative`: of A < 0.
        `dropped` and `dropped_tokens`: share and number of tokens that the trust region leaves without a
        gradient. `ratio_*`: quantiles of the ratio. `approx_kl`: mean of r - 1 - log r. `entropy` and
        `kl_reference`: means, where entropy or ref_log_probs is given.
    """
    terms = _token_terms(log_probs, old_log_probs, advantages, mask, objective)
    mask, A, r, dropped = terms.mask, terms.advantages, terms.ratio, terms.dropped
    clipped = dropped | (terms.weight != r)
    ordered = r[mask].sort().values  # torch.quantile refuses more than 16M values
    if len(ordered) == 0:
        ordered = torch.ones(1, dtype=r.dtype, device=r.device)
    last = len(ordered) - 1
    measured = {
        "tokens": mask.sum(),
        "clipped_positive": _mean(clipped, mask & (A > 0)),
        "clipped_negative": _mean(clipped, mask & (A < 0)),
        "dropped": _mean(dropped, mask),
        "dropped_tokens": dropped.sum(),
        "ratio_mean": ordered.mean(),
        "ratio_smallest": ordered[0],
        "ratio_p01": ordered[round(0.01 * last)],
        "ratio_p50": ordered[round(0.50 * last)],
        "ratio_p99": ordered[round(0.99 * last)],
        "ratio_largest": ordered[-1],
        "approx_kl": _mean(r - 1 - terms.log_ratio, mask),
    }
    if entropy is not None:
        measured["entropy"] = _mean(_visible("entropy", entropy, mask, r.dtype), mask)
    if ref_log_probs is not None:
        measured["kl_reference"] = _mean(_kl_penalty(terms, ref_log_probs), mask)
    # One transfer for all of them: a float() each would stop a GPU a dozen times.
    values = torch.stack([value.double() for value in measured.values()]).tolist()
    return dict(zip(measured, values, strict=True))


class _TokenTerms(NamedTuple):
    """The factors of the formula for every token, (B, T) each; only log_probs has a graph."""

    mask: Tensor
    log_probs: Tensor
    advantages: Tensor
    log_ratio: Tensor
    ratio: Tensor
    weight: Tensor
    dropped: Tensor


def _token_terms(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, objective: Objective
) -> _TokenTerms:
    _check(log_probs, advantages, mask)
    mask = mask.bool()
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    A = advantages.detach()
    A = _visible("advantages", A if A.dim() == 2 else A[:, None].expand_as(mask), mask, dtype)
    visible = _visible("log_probs", log_probs, mask, dtype)
    log_ratio = visible.detach() - _visible("old_log_probs", old_log_probs.detach(), mask, dtype)
    log_ratio = log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    r = log_ratio.exp()
    dropped = ((A > 0) & (r > objective.trust_max)) | ((A < 0) & (r < objective.trust_min))
    weight = r.clamp(objective.ratio_min, objective.ratio_max)
    return _TokenTerms(mask, visible, A, log_ratio, r, weight, dropped)


def _visible(name: str, x: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, T) with zeros where the mask hides."""
    if x.shape != mask.shape:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)} and log_probs {tuple(mask.shape)}; "
            "they must be the same (B, T), token for token"
        )
    return x.to(dtype).masked_fill(~mask, 0.0)


def _kl_penalty(terms: _TokenTerms, ref_log_probs: Tensor) -> Tensor:
    """(B, T): `exp(d) - d - 1`, d = log pi_ref - log pi."""
    ref = _visible("ref_log_probs", ref_log_probs.detach(), terms.mask, terms.ratio.dtype)
    d = (ref - terms.log_probs).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    return d.exp() - d - 1


def _response_scale(
    mask: Tensor,
    sample_share: float,
    group_ids: Tensor | None,
    normaliser: float | tuple[float, float] | None,
) -> Tensor:
    """(B,) factor of every token of a response: tokens of one response always weigh the same."""
    if normaliser is not None and not isinstance(normaliser, tuple):
        if 0 < sample_share < 1:
            raise ValueError(
                f"sample_share {sample_share} mixes two means: give normaliser=(tokens, responses), "
                f"got {normaliser}"
            )
        normaliser = (normaliser, normaliser)
    lengths = mask.sum(1).double()  # (B,)
    visible = (lengths > 0).double()
    Z_tokens = _total(lengths, group_ids, normaliser[0] if normaliser else None)
    Z_responses = _total(visible, group_ids, normaliser[1] if normaliser else None)
    per_token = visible / Z_tokens
    per_response = visible / (lengths.clamp_min(1) * Z_responses)
    return (1 - sample_share) * per_token + sample_share * per_response


def _total(counts: Tensor, group_ids: Tensor | None, normaliser: float | None) -> Tensor:
    """(B,) what each response's count is divided by, at least 1 where nothing counts."""
    if normaliser is not None:
        N = float(normaliser)
        if N == 0 and not counts.any():
            N = 1.0
        if not 0 < N < math.inf:
            raise ValueError(f"normaliser must be a positive count over the whole batch, got {normaliser}")
        return torch.full_like(counts, N)
    if group_ids is None:
        return counts.sum().clamp_min(1).expand_as(counts)
    ids, index = torch.unique(group_ids, return_inverse=True)
    per_group = torch.zeros(len(ids), dtype=counts.dtype, device=counts.device).index_add_(0, index, counts)
    groups = (per_group > 0).sum().clamp_min(1)
    return per_group.clamp_min(1)[index] * groups


def _mean(values: Tensor, where: Tensor) -> Tensor:
    return (values.double() * where).sum() / where.sum().clamp_min(1)


def _check(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> None:
    if log_probs.dim() != 2:
        raise ValueError(f"log_probs must be (B, T), got {tuple(log_probs.shape)}")
    if not log_probs.is_floating_point():
        raise ValueError(f"log_probs must be floating point, got {log_probs.dtype}")
    B, T = log_probs.shape
    if mask.shape != (B, T):
        raise ValueError(f"mask has shape {tuple(mask.shape)} and log_probs {(B, T)}; they must be the same")
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise ValueError("mask must hold 0 and 1 only; put weights into advantages of shape (B, T)")
    if advantages.shape not in ((B,), (B, T)):
        raise ValueError(f"advantages must be ({B},) or ({B}, {T}), got {tuple(advantages.shape)}")
