"""The definition: full logits in float32, log_softmax, gather."""

from torch import Tensor

from ..backends import accumulation_dtype, full_float32

IGNORED = -100


def token_log_probs_reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropy; shapes and rules as in `interface.token_log_probs`."""
    work = accumulation_dtype(hidden, weight)
    with full_float32(hidden):
        logits = hidden.to(work) @ weight.to(work).mT / temperature  # (..., V)
    all_log_probs = logits.log_softmax(-1)
    kept = targets != IGNORED
    log_probs = all_log_probs.gather(-1, targets.where(kept, 0)[..., None])[..., 0]
    entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
    return log_probs.where(kept, 0), entropy.where(kept, 0)
