"""Lightning attention by backend, beside causal softmax attention through SDPA."""

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
    q, k, v, dout = (
        torch.randn(shape, generator=rng).to(device(), getattr(torch, task.dtype)) for _ in range(4)
    )
    log_decay = layer_log_decay(HEADS, 3, 8, device=q.device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if side == "softmax":
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            return scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
        return lightning_attention(q, k, v, log_decay, backend=side)[0]

    if task.kind == "forward":
        return torch.inference_mode()(lambda: attend(q, k, v))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    return lambda: torch.autograd.grad(attend(*leaves), leaves, dout)


def draw(rows: list[Row], folder: Path) -> list[Path]:
    path = folder / "operators.svg"
    with picture(path, panels=2) as axes:
        for axis, task in zip(axes, ("forward", "forward+backward"), strict=True):
            labels = LABELS | {"softmax": "softmax (SDPA)"}
            over_lengths(axis, [row for row in rows if row.task == task], scale=1e3, labels=labels)
            axis.set_title(f"{task}, ms")
            axis.set_yscale("log")
            axis.set_xlabel("tokens")
        axes[0].legend()
    return [path]
