"""Responses as a rollout returns them, and the padded tensors that training makes of them.

Padding is on the right. A response token is known by its position, never by its value: a padding token that
the policy drew counts, one that fills a sequence up does not.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class Response:
    """One response, without padding.

    Args:
        prompt: token ids.
        tokens: (N,) int64.
        log_probs: (N,) float32, as recorded when the tokens were drawn.
        finish_reason: "end", "length" or "repetition".
        temperature: of the distribution that log_probs are of.
        group: number of the prompt.
        routed_experts: (positions, L, A) of prompt and response without the last token, which the rollout
            never ran.
        filtered: log_probs are of a distribution that top-k or top-p had cut, as some engines return them.
    """

    prompt: list[int]
    tokens: Tensor
    log_probs: Tensor
    finish_reason: str
    temperature: float = 1.0
    group: int = 0
    routed_experts: Tensor | None = field(default=None, repr=False)
    filtered: bool = False


@dataclass(frozen=True, eq=False)
class Batch:
    """Responses as right-padded (B, T) tensors; entry t of old_log_probs is of token t given those before."""

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
            routed experts of other tokens.
    """
    _check(responses)
    prompts = torch.tensor([len(r.prompt) for r in responses])[:, None]
    ends = prompts + lengths_of(responses)[:, None]
    sequences = [torch.cat([torch.tensor(r.prompt, dtype=torch.long), r.tokens]) for r in responses]
    log_probs = [torch.cat([torch.zeros(len(r.prompt)), r.log_probs]) for r in responses]
    input_ids = pad_sequence(sequences, batch_first=True, padding_value=pad_token)  # (B, T)
    positions = torch.arange(input_ids.shape[1])
    routed_experts = _padded_experts(responses, input_ids.shape[1])
    return Batch(
        input_ids.to(device),
        (positions < ends).long().to(device),
        ((prompts <= positions) & (positions < ends)).to(device),
        pad_sequence(log_probs, batch_first=True).to(device),
        temperature=responses[0].temperature,
        routed_experts=None if routed_experts is None else routed_experts.to(device),
    )


def batch_log_probs(
    model: PreTrainedModel, batch: Batch, *, replay_routing: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies (B, T) of a batch's tokens under the model as it is now, with a graph.

    They are at the rollout's temperature: ratios of different distributions mean nothing. `replay_routing`
    sends every position to the experts it had at rollout.
    """
    if replay_routing and batch.routed_experts is None:
        raise ValueError("replay_routing needs rollouts drawn with output_routed_experts=True")
    return model.log_probs(  # type: ignore[operator]
        batch.input_ids,
        attention_mask=batch.attention_mask,
        temperature=batch.temperature,
        entropy=True,
        routed_experts=batch.routed_experts if replay_routing else None,
    )


def lengths_of(responses: list[Response]) -> Tensor:
    """(B,) tokens of each response, without its prompt."""
    return torch.tensor([len(response.tokens) for response in responses], dtype=torch.long)


def _check(responses: list[Response]) -> None:
    if not responses:
        raise ValueError("no responses to collate")
    if filtered := [i for i, response in enumerate(responses) if response.filtered]:
        raise ValueError(
            f"log-probabilities of responses {filtered[:10]} are of a distribution that top-k or top-p cut; "
            "ratios need those over the full vocabulary at the sampling temperature"
        )
    temperatures = sorted({response.temperature for response in responses})
    if len(temperatures) > 1:
        raise ValueError(f"rollouts were drawn at temperatures {temperatures}; train on one at a time")
    for i, r in enumerate(responses):
        if r.log_probs.shape != r.tokens.shape:
            raise ValueError(
                f"response {i} has {len(r.tokens)} tokens and {len(r.log_probs)} log-probabilities"
            )


def _padded_experts(responses: list[Response], T: int) -> Tensor | None:
    """(B, T, L, A); positions that the rollout never ran, and whose output is not scored, get the first A."""
    recorded = [r.routed_experts for r in responses if r.routed_experts is not None]
    if not recorded:
        return None
    if len(recorded) < len(responses):
        raise ValueError("some responses have routed_experts and some have none; replay needs all")
    _, L, A = recorded[0].shape
    padded = torch.arange(A, dtype=torch.int16).expand(len(responses), T, L, A).clone()
    for i, (r, experts) in enumerate(zip(responses, recorded, strict=True)):
        ran = len(r.prompt) + len(r.tokens) - 1
        if experts.shape != (ran, L, A):
            raise ValueError(
                f"routed_experts of response {i} are {tuple(experts.shape)} and its tokens need "
                f"{(ran, L, A)}: they are not of these tokens"
            )
        padded[i, :ran] = experts
    return padded
