"""`grouped_linear`: the matrix product of a mixture of experts, in two forms.

`loop` takes the counts to the host and runs one product for each expert that has tokens, so decoding reads no
other weights. `grouped_mm` is PyTorch's one kernel for all experts, which needs no counts on the host. Two
holes of PyTorch's own are closed here: its backward refuses expanded gradients (those of `y.sum()`), and
tokens past the last expert's get whatever was in memory.

On a CPU PyTorch's is a loop as well, over MKL in float32. AMD EPYC (Zen 5), 2 threads, torch 2.13, E = 8,
K = 512, N = 2048; `plain` is a loop of F.linear:

                              float32                        bfloat16
                       loop   grouped_mm    plain      loop   grouped_mm    plain
    R = 8192, ms       44.2         98.9    101.8      19.8         21.6     29.1
    R = 16, us         1010         2300     2330       635          671      698
    R = 2, us           141          363      344       141          147      141

Forward and backward, R = 2048, one thread, ms of CPU time: loop 72, grouped_mm 139; in bfloat16 31 and 34.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..backends import can_check_values, tracing, tracked, without_autocast
from ..gemm import matmul_nt
from .reference import grouped_linear_reference

GroupedBackend = Literal["auto", "reference", "loop", "grouped_mm"]
NAMES = ("reference", "loop", "grouped_mm")


def grouped_linear(
    x: Tensor, weight: Tensor, tokens_per_expert: Tensor, *, backend: GroupedBackend = "auto"
) -> Tensor:
    """Each expert's linear layer on its own tokens x.

        out[r] = weight[e] @ x[r]        for the tokens r of expert e

    Differentiable in x and weight: an expert without tokens has a gradient of zeros, and an empty x stays in
    the graph. Follows autocast as `torch.nn.functional.linear` does.

    Args:
        x: (R, K), tokens sorted by expert.
        weight: (E, N, K), of x's type.
        tokens_per_expert: (E,) int32 or int64, how many each expert has, at most R in all.
        backend: "auto", "reference", "loop" or "grouped_mm".

    Returns:
        out (R, N) in x's type; zero for tokens that no expert has.

    Raises:
        ValueError: shapes, types or counts that do not fit; `grouped_mm` cannot check counts on a GPU.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    _check(x, weight, tokens_per_expert)
    if backend == "auto" and tracing():
        return _operator(x, weight, tokens_per_expert, False)
    name = _choose(x, weight) if backend == "auto" else backend
    differentiate = tracked(x, weight)
    if name == "loop":
        counts = _read(tokens_per_expert, x.shape[0])
        return _Loop.apply(x, weight, counts) if differentiate else _loop(x, weight, counts)
    if can_check_values(tokens_per_expert):
        _read(tokens_per_expert, x.shape[0])
    if name == "grouped_mm":
        _check_grouped_mm(x, weight)
        sizes = tokens_per_expert.to(x.device)
        return _GroupedMM.apply(x, weight, sizes) if differentiate else _grouped_mm(x, weight, sizes)
    if name == "reference":
        return grouped_linear_reference(x, weight, tokens_per_expert)
    raise ValueError(f"backend {backend!r} is unknown; choose 'auto' or one of {list(NAMES)}")


def _choose(x: Tensor, weight: Tensor) -> str:
    """`grouped_mm` where it is one kernel: bfloat16 on Hopper or newer."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device) < (9, 0):
        return "loop"
    return "loop" if _why_not_grouped_mm(x, weight) else "grouped_mm"


def _loop(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[1])
    start = 0
    for e, count in enumerate(counts):
        if count:
            end = start + count
            out[start:end] = matmul_nt(x[start:end], weight[e])
            start = end
    if start < x.shape[0]:
        out[start:] = 0
    return out


def _loop_dweight(x: Tensor, dout: Tensor, counts: list[int]) -> Tensor:
    dweight = x.new_empty(len(counts), dout.shape[1], x.shape[1])
    start = 0
    for e, count in enumerate(counts):
        end = start + count
        dweight[e] = matmul_nt(dout[start:end].mT, x[start:end].mT) if count else 0
        start = end
    return dweight


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        with without_autocast(x):
            return _loop(x, weight, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        need_dx, need_dweight, _ = ctx.needs_input_grad
        dout = dout.contiguous()
        with without_autocast(x):
            dx = _loop(dout, weight.mT, ctx.counts) if need_dx else None
            dweight = _loop_dweight(x, dout, ctx.counts) if need_dweight else None
        return dx, dweight, None


def _grouped_mm(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    if not x.shape[0]:
        return x.new_zeros(0, weight.shape[1])
    ends = counts.cumsum(0, dtype=torch.int32)
    out = torch.nn.functional.grouped_mm(x, weight.mT, offs=ends)
    foreign = torch.arange(x.shape[0], device=x.device) >= ends[-1]
    return out.masked_fill_(foreign[:, None], 0)


def _grouped_mm_dweight(x: Tensor, dout: Tensor, counts: Tensor) -> Tensor:
    if not x.shape[0]:
        return x.new_zeros(len(counts), dout.shape[1], x.shape[1])
    dweight = torch.nn.functional.grouped_mm(dout.mT, x, offs=counts.cumsum(0, dtype=torch.int32))
    return dweight.masked_fill_((counts == 0)[:, None, None], 0)


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        with without_autocast(x):
            return _grouped_mm(x, weight, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, counts = ctx.saved_tensors
        need_dx, need_dweight, _ = ctx.needs_input_grad
        dout = dout.contiguous()
        with without_autocast(x):
            dx = _grouped_mm(dout, weight.mT, counts) if need_dx else None
            dweight = _grouped_mm_dweight(x, dout, counts) if need_dweight else None
        return dx, dweight, None


@torch.library.custom_op("minimax_kernels::grouped_linear", mutates_args=())
def _operator(x: Tensor, weight: Tensor, tokens_per_expert: Tensor, transposed: bool) -> Tensor:
    """`grouped_linear` as one opaque step of a trace, in which no count can be read."""
    one_kernel = _choose(x, weight) == "grouped_mm"
    weight = weight.mT if transposed else weight
    with without_autocast(x):
        if one_kernel:
            return _grouped_mm(x, weight, tokens_per_expert)
        return _loop(x, weight, _read(tokens_per_expert, x.shape[0]))


@torch.library.custom_op("minimax_kernels::grouped_linear_dweight", mutates_args=())
def _operator_dweight(x: Tensor, dout: Tensor, tokens_per_expert: Tensor) -> Tensor:
    with without_autocast(x):
        if _choose(x, dout) == "grouped_mm":
            return _grouped_mm_dweight(x, dout, tokens_per_expert)
        return _loop_dweight(x, dout, _read(tokens_per_expert, x.shape[0]))


@_operator.register_fake
def _(x: Tensor, weight: Tensor, tokens_per_expert: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])


@_operator_dweight.register_fake
def _(x: Tensor, dout: Tensor, tokens_per_expert: Tensor) -> Tensor:
    return x.new_empty(tokens_per_expert.shape[0], dout.shape[1], x.shape[1])


def _keep_inputs(ctx, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _operator_backward(ctx, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, weight, counts = ctx.saved_tensors
    need_dx, need_dweight = ctx.needs_input_grad[:2]
    dout = dout.contiguous()
    dx = _operator(dout, weight, counts, True) if need_dx else None
    return dx, _operator_dweight(x, dout, counts) if need_dweight else None, None, None


_operator.register_autograd(_operator_backward, setup_context=_keep_inputs)


def _read(tokens_per_expert: Tensor, R: int) -> list[int]:
    counts = tokens_per_expert.tolist()
    if sum(counts) > R or min(counts, default=0) < 0:
        raise ValueError(f"tokens_per_expert must be 0 or more each and at most R = {R} in all, got {counts}")
    return counts


def _check(x: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> None:
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"x must be (R, K) and weight (E, N, K) with one K, got {tuple(x.shape)}, {tuple(weight.shape)}"
        )
    if x.dtype != weight.dtype or x.device != weight.device or not x.is_floating_point():
        raise ValueError(
            f"x and weight must share one floating type and device, got {x.dtype} on {x.device} and "
            f"{weight.dtype} on {weight.device}"
        )
    if tokens_per_expert.shape != weight.shape[:1] or tokens_per_expert.dtype not in (
        torch.int32,
        torch.int64,
    ):
        raise ValueError(
            f"tokens_per_expert must be ({weight.shape[0]},) int32 or int64, one count for each expert, got "
            f"{tuple(tokens_per_expert.shape)} {tokens_per_expert.dtype}"
        )


def _check_grouped_mm(x: Tensor, weight: Tensor) -> None:
    if reason := _why_not_grouped_mm(x, weight):
        raise ValueError(f"backend 'grouped_mm' {reason}; use backend='loop'")


def _why_not_grouped_mm(x: Tensor, weight: Tensor) -> str:
    if not hasattr(torch.nn.functional, "grouped_mm"):
        return "is not in this version of PyTorch"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"takes float32, bfloat16 and float16, got {x.dtype}"
    multiple = 16 // x.element_size()
    if x.shape[1] % multiple or weight.shape[1] % multiple:
        return f"needs K and N that are multiples of {multiple}, got {x.shape[1]} and {weight.shape[1]}"
    if not (x.is_contiguous() and weight.is_contiguous()):
        return "needs contiguous tensors"
    return ""
