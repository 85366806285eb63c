"""Responses as a rollout hands them over, and the tensors that training makes of them.

Rows are padded on the right. What is a response token is known by position, never by comparing token values:
a padding token that the policy drew counts, one that fills a row does not.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Response:
    """One response, without padding.

    log_probs: of each token, when and by whom it was drawn. finish: "end", "length" or "repetition".
    filtered: log_probs are of a distribution that top-k or top-p had cut, as some engines return them.
    routing: (positions, L, A) experts of prompt and response without the last token, which the rollout never
        ran.
    """

    prompt: list[int]
    tokens: list[int]
    log_probs: list[float]
    finish: str
    temperature: float = 1.0
    group: int = 0
    routing: Tensor | None = field(default=None, repr=False)
    filtered: bool = False


@dataclass(frozen=True)
class Batch:
    """Responses as right-padded tensors, all (B, T); entry t of old_log_probs is of token t given those
    before it."""

    input_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    old_log_probs: Tensor
    temperature: float
    routed_experts: Tensor | None  # (B, T, L, A)


def collate(responses: list[Response], *, pad_token: int, device: torch.device | str = "cpu") -> Batch:
    """Tensors of these responses, padded on the right to the longest.

    Raises:
        ValueError: rollouts at different temperatures, log-probabilities of a filtered distribution, or
            routing that does not belong to its tokens.
    """
    if not responses:
        raise ValueError("no responses to collate")
    if filtered := [i for i, response in enumerate(responses) if response.filtered]:
        raise ValueError(
            f"log-probabilities of responses {filtered[:10]} are of a distribution that top-k or top-p cut; "
            "ratios need those over the full vocabulary at the sampling temperature"
        )
    temperatures = {response.temperature for response in responses}
    if len(temperatures) > 1:
        raise ValueError(
            f"rollouts were drawn at temperatures {sorted(temperatures)}; train on one at a time"
        )
    B, T = len(responses), max(len(r.prompt) + len(r.tokens) for r in responses)
    input_ids = torch.full((B, T), pad_token)
    attention_mask = torch.zeros(B, T, dtype=torch.long)
    response_mask = torch.zeros(B, T, dtype=torch.bool)
    old_log_probs = torch.zeros(B, T)
    for i, r in enumerate(responses):
        if len(r.log_probs) != len(r.tokens):
            raise ValueError(
                f"response {i} has {len(r.tokens)} tokens and {len(r.log_probs)} log-probabilities"
            )
        first, end = len(r.prompt), len(r.prompt) + len(r.tokens)
        input_ids[i, :end] = torch.tensor(r.prompt + r.tokens)
        attention_mask[i, :end] = 1
        response_mask[i, first:end] = True
        old_log_probs[i, first:end] = torch.tensor(r.log_probs)
    routed = _routing(responses, T)
    return Batch(
        input_ids.to(device),
        attention_mask.to(device),
        response_mask.to(device),
        old_log_probs.to(device),
        temperature=temperatures.pop(),
        routed_experts=None if routed is None else routed.to(device),
    )


def batch_log_probs(
    model: PreTrainedModel, batch: Batch, *, temperature: float, replay_routing: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies (B, T) of a batch's tokens under the model as it is now, with a graph.

    Args:
        temperature: must be the rollout's: ratios of different distributions mean nothing.
        replay_routing: send every position to the experts it had at rollout.
    """
    if temperature != batch.temperature:
        raise ValueError(
            f"rollouts were drawn at temperature {batch.temperature} and training asks for {temperature}; "
            "log-probabilities are comparable at one temperature only"
        )
    if replay_routing and batch.routed_experts is None:
        raise ValueError("replay_routing needs rollouts drawn with record_routing=True")
    return model.log_probs(
        batch.input_ids,
        attention_mask=batch.attention_mask,
        temperature=temperature,
        entropy=True,
        routed_experts=batch.routed_experts if replay_routing else None,
    )


def _routing(responses: list[Response], T: int) -> Tensor | None:
    """(B, T, L, A); positions that the rollout never ran, whose output nobody scores, get the first A
    experts."""
    recorded = [r.routing for r in responses if r.routing is not None]
    if not recorded:
        return None
    if len(recorded) < len(responses):
        raise ValueError("some responses were drawn with record_routing and some without; replay needs all")
    _, L, A = recorded[0].shape
    routed = torch.arange(A, dtype=torch.int16).expand(len(responses), T, L, A).clone()
    for i, (r, routing) in enumerate(zip(responses, recorded, strict=True)):
        ran = len(r.prompt) + len(r.tokens) - 1
        if routing.shape != (ran, L, A):
            raise ValueError(
                f"routing of response {i} is {tuple(routing.shape)} and its tokens need {(ran, L, A)}: "
                "it is not the routing of these tokens"
            )
        routed[i, :ran] = routing
    return routed
