"""Log-probabilities of given tokens in chunks beside log_softmax of the full logits, forward and backward."""

from collections.abc import Callable

import torch
from torch import Tensor

from minimax_kernels import token_log_probs
from minimax_kernels.log_probs.reference import token_log_probs_reference

from ..harness.measure import Task, Work, device

ABOUT = (
    "log-probabilities of given tokens and their gradients, in chunks against log_softmax of the full "
    "logits: width 512, vocabulary 200,064"
)
TESTS = ("tests/kernels/test_log_probs.py",)
SIDES = ("chunked", "plain")
TASKS = tuple(Task("log-probs", N, dtype="bfloat16", rounds=5, memory=True) for N in (256, 1024, 4096))
QUICK = (Task("log-probs", 64, dtype="bfloat16", rounds=3),)
VOCABULARY, WIDTH = 200_064, 512


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return token_log_probs_reference(hidden, weight, targets)[0]


FORMS: dict[str, Callable[..., Tensor]] = {"chunked": token_log_probs, "plain": plain}


def prepare(side: str, task: Task) -> Work:
    """Forward and backward for `task.length` tokens at the released models' vocabulary."""
    rng = torch.Generator().manual_seed(task.length)

    def leaf(*shape: int, std: float) -> Tensor:
        values = torch.empty(shape, dtype=getattr(torch, task.dtype)).normal_(std=std, generator=rng)
        return values.to(device()).requires_grad_()

    hidden, weight = leaf(task.length, WIDTH, std=1.0), leaf(VOCABULARY, WIDTH, std=WIDTH**-0.5)
    targets = torch.randint(VOCABULARY, (task.length,), generator=rng).to(device())

    def work() -> None:
        hidden.grad = weight.grad = None
        FORMS[side](hidden, weight, targets).sum().backward()

    return work
