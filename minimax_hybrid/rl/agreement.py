"""How far the probabilities of training and rollout lie apart (report, section 3.2 and figure 3)."""

import torch
from torch import Tensor


@torch.no_grad()
def agreement(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """Compare two records of the same tokens, all (B, T), where mask is true.

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
