"""`grouped_linear`: the matrix product of a mixture of experts, in two forms.

`loop` takes the counts to the host and runs one product for each expert that has rows, so decoding reads no other
weights. `grouped_mm` is PyTorch's one kernel for all, which leaves the counts on the GPU. PyTorch's own form has two
holes that are closed here: its backward refuses expanded gradients (those of `y.sum()`), and rows past the last
expert's hold whatever was in memory.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..gemm import product
from .reference import grouped_linear_reference

GroupedBackend = Literal["auto", "reference", "loop", "grouped_mm"]
NAMES = ("reference", "loop", "grouped_mm")


def grouped_linear(
    x: Tensor, weight: Tensor, rows_per_expert: Tensor, *, backend: GroupedBackend = "auto"
) -> Tensor:
    """Each expert's linear layer on its own rows of x.

        out[r] = weight[e] @ x[r]        for the rows r of expert e

    Differentiable in x and weight; an expert without rows has a gradient of zeros, and an empty x stays in the graph.
    Follows autocast as `torch.nn.functional.linear` does.

    Args:
        x: (R, K), rows sorted by expert.
        weight: (E, N, K), of x's type.
        rows_per_expert: (E,) int32 or int64 rows of each expert, R at most in all.
        backend: "auto", "reference", "loop" or "grouped_mm".

    Returns:
        out (R, N) in x's type; rows that no expert owns are zero.

    Raises:
        ValueError: shapes, types or counts that do not fit. Counts on a GPU are not read, so not checked.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    _check(x, weight, rows_per_expert)
    if backend == "auto":
        backend = _choose(x, weight)
    tracked = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if backend == "loop":
        counts = _counts(rows_per_expert, len(x))
        return _Loop.apply(x, weight, counts) if tracked else _loop(x, weight, counts)
    if backend == "grouped_mm":
        if rows_per_expert.device.type == "cpu":
            _counts(rows_per_expert, len(x))
        counts = rows_per_expert.to(x.device)
        return _GroupedMM.apply(x, weight, counts) if tracked else _grouped_mm(x, weight, counts)
    if backend == "reference":
        _counts(rows_per_expert, len(x))
        return grouped_linear_reference(x, weight, rows_per_expert)
    raise ValueError(f"backend {backend!r} is unknown; choose 'auto' or one of {list(NAMES)}")


def _choose(x: Tensor, weight: Tensor) -> str:
    """`grouped_mm` for bfloat16 on Hopper or newer, where it is one kernel and needs no counts on the host; else
    `loop`. (Elsewhere PyTorch's own grouped_mm is a loop as well.)"""
    if not x.is_cuda or x.dtype != torch.bfloat16 or not hasattr(torch.nn.functional, "grouped_mm"):
        return "loop"
    aligned = x.shape[1] % 8 == 0 and weight.shape[1] % 8 == 0  # 16 bytes
    return "grouped_mm" if aligned and torch.cuda.get_device_capability(x.device) >= (9, 0) else "loop"


def _loop(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    outs, start = [], 0
    for e, count in enumerate(counts):
        if count:
            outs.append(product(x[start : start + count], weight[e]))
            start += count
    if start < len(x) or not outs:
        outs.append(x.new_zeros(len(x) - start, weight.shape[1]))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        with torch.autocast(x.device.type, enabled=False):
            return _loop(x, weight, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        need_dx, need_dweight, _ = ctx.needs_input_grad
        with torch.autocast(x.device.type, enabled=False):
            dx = _loop(dout.contiguous(), weight.mT, ctx.counts) if need_dx else None
            dweight = _loop_dweight(x, dout.contiguous(), ctx.counts) if need_dweight else None
        return dx, dweight, None


def _loop_dweight(x: Tensor, dout: Tensor, counts: list[int]) -> Tensor:
    dweight = x.new_empty(len(counts), dout.shape[1], x.shape[1])
    start = 0
    for e, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            dweight[e] = product(dout[rows].mT, x[rows].mT)
            start += count
        else:
            dweight[e] = 0
    return dweight


def _grouped_mm(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    if not len(x):
        return x.new_zeros(0, weight.shape[1])
    ends = counts.cumsum(0, dtype=torch.int32)
    out = torch.nn.functional.grouped_mm(x, weight.mT, offs=ends)
    owned = torch.arange(len(x), device=x.device) < ends[-1]
    return out.masked_fill_(~owned[:, None], 0)


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        with torch.autocast(x.device.type, enabled=False):
            return _grouped_mm(x, weight, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, counts = ctx.saved_tensors
        need_dx, need_dweight, _ = ctx.needs_input_grad
        dout = dout.contiguous()
        with torch.autocast(x.device.type, enabled=False):
            dx = _grouped_mm(dout, weight.mT, counts) if need_dx else None
            dweight = _grouped_mm_dweight(x, dout, counts) if need_dweight else None
        return dx, dweight, None


def _grouped_mm_dweight(x: Tensor, dout: Tensor, counts: Tensor) -> Tensor:
    if not len(x):
        return x.new_zeros(len(counts), dout.shape[1], x.shape[1])
    ends = counts.cumsum(0, dtype=torch.int32)
    dweight = torch.nn.functional.grouped_mm(dout.mT, x, offs=ends)
    return dweight.masked_fill_((counts == 0)[:, None, None], 0)


def _counts(rows_per_expert: Tensor, R: int) -> list[int]:
    counts = rows_per_expert.tolist()
    if sum(counts) > R or min(counts, default=0) < 0:
        raise ValueError(f"rows_per_expert must be 0 or more and sum to at most R = {R}, got {counts}")
    return counts


def _check(x: Tensor, weight: Tensor, rows_per_expert: Tensor) -> None:
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"x must be (R, K) and weight (E, N, K) with one K, got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if x.dtype != weight.dtype or x.device != weight.device or not x.is_floating_point():
        raise ValueError(
            f"x and weight must share one floating type and device, got {x.dtype} on {x.device} and "
            f"{weight.dtype} on {weight.device}"
        )
    if rows_per_expert.shape != weight.shape[:1] or rows_per_expert.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"rows_per_expert must be ({len(weight)},) int32 or int64, one count for each expert, got "
            f"{tuple(rows_per_expert.shape)} {rows_per_expert.dtype}"
        )
