"""The output head in float32: the report's repair for training and inference that disagree (section 3.2).

It speaks of arithmetic and result, not of storage: a bfloat16 weight stays bfloat16 and is multiplied
exactly. The fault is to round the logits to bfloat16 and cast them up afterwards, as the released code does.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from minimax_kernels import fp32_linear, token_log_probs
from minimax_kernels.backends import full_float32

TOKEN_CHUNK = 256


class Scoring(NamedTuple):
    """How to score given tokens: at which sampling temperature, and whether with the entropy."""

    temperature: float = 1.0
    entropy: bool = False


class LMHead(nn.Linear):
    """Hidden states (..., M) to next-token logits (..., V) in `config.head_dtype`, float32 by default.

    With `targets` (...): to their log-probabilities and, if asked for, entropies; no full logits exist.
    """

    def __init__(self, width: int, vocab_size: int, *, head_dtype: str):
        super().__init__(width, vocab_size, bias=False)
        self.head_dtype = getattr(torch, head_dtype)

    @classmethod
    def of(cls, linear: nn.Linear | nn.Embedding, *, head_dtype: str) -> "LMHead":
        """A head with the weight (V, M) of a plain layer: the same parameter, not a copy."""
        bias = getattr(linear, "bias", None)
        if bias is not None:
            raise ValueError(
                f"the output head has a bias of {bias.numel()} values; checkpoints of this model have "
                "no place for one, give a layer with bias=False"
            )
        with torch.device("meta"):
            head = cls(linear.weight.shape[1], linear.weight.shape[0], head_dtype=head_dtype)
        head.weight = linear.weight
        return head

    def forward(  # type: ignore[override]
        self, hidden: Tensor, targets: Tensor | None = None, scoring: Scoring | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        if targets is not None:
            return token_log_probs(hidden, self.weight, targets, **(scoring or Scoring())._asdict())
        if self.head_dtype == torch.float32:
            return fp32_linear(hidden, self.weight)
        with full_float32(hidden):
            return nn.functional.linear(hidden.to(self.head_dtype), self.weight.to(self.head_dtype))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, head_dtype={self.head_dtype}"


def compute_logits(head: nn.Module, hidden: Tensor, *, head_dtype: str) -> Tensor:
    """Logits (..., V) of whatever stands as the head, at least as wide as `head_dtype`.

    Raises:
        ValueError: a replaced or wrapped head rounds its logits.
    """
    logits, dtype = head(hidden), getattr(torch, head_dtype)
    if torch.promote_types(logits.dtype, dtype) != logits.dtype:
        raise ValueError(
            f"the output head, a {type(head).__name__}, gives {logits.dtype} and config.head_dtype is "
            f"{head_dtype}; give a plain layer to set_output_embeddings(), which keeps that arithmetic, or "
            f"set config.head_dtype to {str(logits.dtype).removeprefix('torch.')!r}"
        )
    return logits


def head_log_probs(
    head: nn.Module, hidden: Tensor, targets: Tensor, scoring: Scoring, *, head_dtype: str = "float32"
) -> tuple[Tensor, ...]:
    """`token_log_probs` of a model's head as it is, and the entropies if they are asked for.

    A head that is more than its weight (an adapter, a hook, an offloading wrapper, another `head_dtype`) is
    called, a few tokens at a time, and again in the backward pass, so no full logits are kept then either.
    """
    temperature, entropy = scoring
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0")
    # FSDP gathers the weight in a hook of its own
    hooked = (head._forward_hooks or head._forward_pre_hooks) and not isinstance(head, FSDPModule)
    ours = getattr(type(head), "forward", None) is LMHead.forward and "forward" not in vars(head)
    if ours and not hooked and head.head_dtype == torch.float32:
        found = head(hidden, targets, scoring)
        return found if entropy else (found,)
    parts = zip(hidden.flatten(0, -2).split(TOKEN_CHUNK), targets.flatten().split(TOKEN_CHUNK), strict=True)
    scored = [
        checkpoint(_score_tokens, head, part, target, temperature, head_dtype, use_reentrant=False)
        for part, target in parts
    ]
    log_probs, entropies = torch.cat(scored, dim=1).view(2, *targets.shape)
    return (log_probs, entropies) if entropy else (log_probs,)


def _score_tokens(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, head_dtype: str
) -> Tensor:
    """Log-probabilities and entropies (2, n), zero where the target is -100."""
    logits = compute_logits(head, hidden, head_dtype=head_dtype)
    log_probs = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    chosen = log_probs.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    return torch.stack([chosen, entropies]).where(targets >= 0, 0)
