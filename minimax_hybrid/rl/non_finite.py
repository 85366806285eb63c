"""Which parameter and which token made a gradient non-finite: slow, and only called when a run is about to
stop.

A vector that is exactly zero is the usual cause: every norm above it multiplies the gradient by 1/sqrt(eps),
which overflows float32 within a few layers while the loss looks healthy.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .batches import Response, batch_log_probs, collate


class NonFiniteError(FloatingPointError):
    """A loss or gradient that is not finite. The step was not made."""


def describe(
    model: PreTrainedModel, responses: list[Response], *, pad_token: int, replay_routing: bool
) -> str:
    """Parameters whose gradient is not finite, then the first token of a response that alone makes one so."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    bad = [name for name, p in parameters.items() if p.grad is not None and not p.grad.isfinite().all()]
    where = (
        f"parameters {', '.join(bad[:3])}{f' and {len(bad) - 3} more' if len(bad) > 3 else ''}; "
        if bad
        else ""
    )
    device = next(model.parameters()).device
    for row, response in enumerate(responses):
        batch = collate([response], pad_token=pad_token, device=device)
        log_probs, _ = batch_log_probs(
            model, batch, temperature=batch.temperature, replay_routing=replay_routing
        )
        for place in batch.response_mask[0].nonzero().flatten().tolist():
            if _is_bad(log_probs[0, place], list(parameters.values())):
                ids = batch.input_ids[0, : place + 1].tolist()
                return (
                    f"{where}response {row}, token {place - len(response.prompt)} (id {ids[-1]}, predicted "
                    f"after id {ids[-2]}); ids up to there: {ids[-12:]}"
                )
    return f"{where}no single token does it alone; a sum overflows"


def _is_bad(value: Tensor, parameters: list[Tensor]) -> bool:
    if not value.isfinite():
        return True
    gradients = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    return any(g is not None and not g.isfinite().all() for g in gradients)
