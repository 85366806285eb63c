"""`token_log_probs`: the public function, its checks, and the tokens that count."""

import math

import torch
from torch import Tensor

from ..head import check_head
from .chunked import Chunks, TokenLogProbs
from .reference import IGNORED


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    token_chunk: int = 1024,
    vocab_chunk: int = 8192,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probabilities of given tokens under the head's distribution, without the full logits.

        log_prob = log_softmax(hidden @ weight.T / temperature)[target]

    Differentiable in hidden and weight, through both results. Arithmetic is float32 whatever the types
    (float64 if either input is), under autocast too. Beside results and gradients, forward and backward
    hold two chunks of logits at most (token_chunk x vocab_chunk x 4 bytes each), up to three chunks of weight
    (vocab_chunk x M x 4 bytes each: weight, gradient, a term of it), and hidden's gradient in float32.

    Args:
        hidden: (..., M); entry i predicts targets[i], so the caller has shifted.
        weight: (V, M), the head.
        targets: (...) int64 in [0, V), or -100: log-prob and entropy 0, no gradient, and no work.
        temperature: what the logits are divided by; above 0.
        entropy: also return the entropy of the distribution, in nats.
        token_chunk, vocab_chunk: tokens and vocabulary entries of a chunk of logits.

    Returns:
        log-probabilities (...) float32; with `entropy`, a pair of them and the entropies (...).

    Raises:
        ValueError: shapes or types that do not fit, a target outside the vocabulary, a temperature <= 0.
    """
    _check(hidden, weight, targets, temperature, token_chunk, vocab_chunk)
    states, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    kept = (flat != IGNORED).nonzero()[:, 0]
    every = len(kept) == len(flat)
    chunks = Chunks(temperature, token_chunk, vocab_chunk)
    results = TokenLogProbs.apply(
        states if every else states[kept], weight, flat if every else flat[kept], chunks, entropy
    )
    log_probs, entropies = (x if x is None or every else _spread(x, kept, len(flat)) for x in results)
    if not entropy:
        return log_probs.view(targets.shape)
    return log_probs.view(targets.shape), entropies.view(targets.shape)


def _spread(x: Tensor, kept: Tensor, N: int) -> Tensor:
    return x.new_zeros(N).index_put((kept,), x)


def _check(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, token_chunk: int, vocab_chunk: int
) -> None:
    check_head(hidden, weight)
    if targets.shape != hidden.shape[:-1] or targets.dtype != torch.int64 or targets.device != hidden.device:
        raise ValueError(
            f"targets must be {tuple(hidden.shape[:-1])} int64 on {hidden.device}, one for each token, got "
            f"{tuple(targets.shape)} {targets.dtype} on {targets.device}"
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be finite and above 0, got {temperature}; score greedy at 1.0")
    if token_chunk < 1 or vocab_chunk < 1:
        raise ValueError(
            f"chunks must be 1 or more, got token_chunk {token_chunk} and vocab_chunk {vocab_chunk}"
        )
    V = len(weight)
    outside = targets[((targets < 0) | (targets >= V)) & (targets != IGNORED)]
    if len(outside):
        raise ValueError(
            f"targets must lie in [0, {V}) or be {IGNORED} (ignored), got {outside[0].item()} "
            f"and {len(outside) - 1} more outside"
        )
