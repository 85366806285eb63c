"""Logits in float32 from hidden states and a head of any type: the FP32 head of the MiniMax-M1 report.

Products of two bfloat16 numbers are exact in float32, so a bfloat16 product with float32 sums and a float32
result is the float32 computation. A GPU offers it (`torch.mm(out_dtype=)`). A CPU does not, so there a
slice of the weight at a time becomes float32 and is used while it is in cache. Microseconds of
`fp32_linear` for M = 512, on an AMD EPYC (Zen 5), 2 threads, torch 2.13, beside F.linear in bfloat16 and in
float32 with a copy of the weight:

    V = 8192, tokens        1      2      8     64
    fp32_linear           265    569    653   1824
    F.linear, bfloat16    226    237    284    828
    F.linear, float32     243    560    864   4134
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .backends import accumulation_dtype, full_float32, tracked
from .gemm import matmul_nt

# 16 MB in float32: slices of 2048 to 8192 entries of the vocabulary were best at M = 512, smaller ones pay
# for their calls.
SLICE_WEIGHTS = 2**22


def fp32_linear(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits hidden @ weight.T in float32 arithmetic, under autocast too (float64 if either input is).

    Differentiable in both; no float32 copy of the weight is made, and gradients have their inputs' types.

    Args:
        hidden: (..., M).
        weight: (V, M).

    Returns:
        (..., V) float32.
    """
    check_head(hidden, weight)
    flat = hidden.reshape(-1, hidden.shape[-1])
    with full_float32(hidden):
        out = _Logits.apply(flat, weight) if tracked(hidden, weight) else _logits(flat, weight)
    return out.view(*hidden.shape[:-1], len(weight))


def logits_slice(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits (N, V) in `dtype`, outside autograd; a weight of another type is copied: pass a slice."""
    if hidden.is_cuda and hidden.dtype == weight.dtype and hidden.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden, weight.mT, out_dtype=dtype)
    return matmul_nt(hidden.to(dtype), weight.to(dtype))


def check_head(hidden: Tensor, weight: Tensor) -> None:
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be (..., M) and weight (V, M) with one M, got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if hidden.device != weight.device or not (hidden.is_floating_point() and weight.is_floating_point()):
        raise ValueError(
            "hidden and weight must be floating and share a device, got "
            f"{hidden.dtype} on {hidden.device} and {weight.dtype} on {weight.device}"
        )


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    dtype = accumulation_dtype(hidden, weight)
    if weight.dtype == dtype or hidden.is_cuda and hidden.dtype == weight.dtype:
        return logits_slice(hidden, weight, dtype)
    hidden = hidden.to(dtype)
    out = hidden.new_empty(len(hidden), len(weight))
    for part in _slices(weight):
        out[:, part] = logits_slice(hidden, weight[part], dtype)
    return out


def _slices(weight: Tensor) -> list[slice]:
    V, M = weight.shape
    step = max(1, SLICE_WEIGHTS // max(1, M))
    return [slice(start, start + step) for start in range(0, V, step)]


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return _logits(hidden, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        need_dhidden, need_dweight = ctx.needs_input_grad
        work = dlogits.dtype
        dhidden = torch.zeros_like(hidden, dtype=work) if need_dhidden else None
        dweight = torch.empty_like(weight) if need_dweight else None
        hidden_work = hidden.to(work)
        with full_float32(hidden):
            for part in _slices(weight):
                dpart = dlogits[:, part].contiguous()
                if dhidden is not None:
                    dhidden += matmul_nt(dpart, weight[part].to(work).mT)
                if dweight is not None:
                    dweight[part] = matmul_nt(dpart.mT, hidden_work.mT)
        return None if dhidden is None else dhidden.to(hidden.dtype), dweight
