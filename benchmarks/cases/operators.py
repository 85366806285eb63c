"""Lightning attention by backend, beside causal softmax attention through SDPA."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from minimax_hybrid.cost.plotting import picture
from minimax_hybrid.lightning_attention import layer_log_decay
from minimax_kernels import lightning_attention

from ..harness.measure import Task, Work, device
from ..harness.plot import LABELS, over_lengths
from ..harness.rows import Row

ABOUT = "lightning attention against causal softmax attention (SDPA), 8 heads of 64"
TESTS = ("tests/kernels/test_lightning.py",)
if not torch.cuda.is_available():  # Triton's kernels are not timed here, and its interpreter is slow
    TESTS += ("-k", "chunked")
SIDES = ("triton", "chunked", "reference", "softmax")
TASKS = tuple(
    Task(kind, T, rounds=7, without=("reference",) if T > 1024 else ())
    for kind in ("forward", "forward+backward")
    for T in (256, 1024, 4096, 16384)
)
QUICK = (Task("forward", 1024, rounds=3), Task("forward+backward", 1024, rounds=3))
HEADS, WIDTH = 8, 64


def prepare(side: str, task: Task) -> Work:
    rng = torch.Generator().manual_seed(task.length)
    shape = (task.batch, task.length, HEADS, WIDTH)
    inputs = [torch.randn(shape, generator=rng).to(device(), getattr(torch, task.dtype)) for _ in range(4)]
    return attention_work(side, inputs, backward="backward" in task.kind)


def attention_work(
    side: str, inputs: list[Tensor], *, backward: bool, cu_seqlens: Tensor | None = None
) -> Work:
    """Attention of q, k, v, or it and its gradients for dout, with the decay of an early layer.

    Args:
        inputs: q, k, v and dout, (B, T, H, D).
    """
    q, k, v, dout = inputs
    attend = operator(side, layer_log_decay(q.shape[2], 3, 8, device=q.device), cu_seqlens)
    if not backward:
        return torch.inference_mode()(lambda: attend(q, k, v))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    return lambda: torch.autograd.grad(attend(*leaves), leaves, dout)


def operator(side: str, log_decay: Tensor, cu_seqlens: Tensor | None = None) -> Callable[..., Tensor]:
    if side == "softmax":
        attention = scaled_dot_product_attention
        return lambda *qkv: attention(*(x.transpose(1, 2) for x in qkv), is_causal=True).transpose(1, 2)
    if side == "fla":
        from fla.ops.simple_gla import chunk_simple_gla

        bounds = None if cu_seqlens is None else cu_seqlens.long()
        return lambda *qkv: chunk_simple_gla(*qkv, g_gamma=log_decay, scale=1.0, cu_seqlens=bounds)[0]
    return lambda *qkv: lightning_attention(*qkv, log_decay, cu_seqlens=cu_seqlens, backend=side)[0]


def draw(rows: list[Row], folder: Path) -> list[Path]:
    path = folder / "operators.svg"
    with picture(path, panels=2) as axes:
        for axis, task in zip(axes, ("forward", "forward+backward"), strict=True):
            labels = LABELS | {"softmax": "softmax (SDPA)"}
            over_lengths(axis, [row for row in rows if row.task == task], scale=1e3, labels=labels)
            axis.set(title=f"{task}, ms", yscale="log", xlabel="tokens")
        axes[0].legend()
    return [path]
