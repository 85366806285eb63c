"""The operators that are timed: lightning attention by backend beside causal softmax through SDPA, and
log-probabilities of given tokens in chunks beside log_softmax of the full logits."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from minimax_hybrid.lightning_attention import layer_log_decay
from minimax_kernels import lightning_attention

from .log_probs import FORMS, VOCABULARY
from .measure import Work

if TYPE_CHECKING:
    from .cases import Task

HEADS, WIDTH = 8, 64
HIDDEN = 512  # width of the hidden states whose log-probabilities are taken


def operator_work(side: str, task: "Task") -> Work:
    rng = torch.Generator().manual_seed(task.length)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (task.batch, task.length, HEADS, WIDTH)
    q, k, v, dout = (
        torch.randn(shape, generator=rng).to(device, getattr(torch, task.dtype)) for _ in range(4)
    )
    log_decay = layer_log_decay(HEADS, 3, 8, device=q.device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if side == "softmax":
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            return scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
        return lightning_attention(q, k, v, log_decay, backend=side)[0]

    if task.kind == "forward":

        @torch.inference_mode()
        def work() -> None:
            attend(q, k, v)

        return work
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def work_with_gradients() -> None:
        torch.autograd.grad(attend(*leaves), leaves, dout)

    return work_with_gradients


def log_probs_work(side: str, task: "Task") -> Work:
    """Forward and backward for `task.length` tokens at the released models' vocabulary."""
    rng = torch.Generator().manual_seed(task.length)
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, task.dtype)

    def leaf(*shape: int, std: float) -> Tensor:
        values = torch.empty(shape, dtype=dtype).normal_(std=std, generator=rng)
        return values.to(device).requires_grad_()

    hidden, weight = leaf(task.length, HIDDEN, std=1.0), leaf(VOCABULARY, HIDDEN, std=HIDDEN**-0.5)
    targets = torch.randint(VOCABULARY, (task.length,), generator=rng).to(device)

    def work() -> None:
        hidden.grad = weight.grad = None
        FORMS[side](hidden, weight, targets).sum().backward()

    return work
