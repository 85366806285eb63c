"""Logits in float32 from hidden states and a head of any type: the FP32 head of the MiniMax-M1 report.

Products of two bfloat16 numbers are exact in float32, so a bfloat16 product with float32 sums and a float32 result
is the float32 computation. A GPU offers it (`torch.mm(out_dtype=)`); a CPU does not, so there a slice of the weight
at a time is turned into float32, small enough to stay in cache.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..gemm import product

VOCAB_SLICE = 1024


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
    rows = hidden.reshape(-1, hidden.shape[-1])
    tracked = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.autocast(hidden.device.type, enabled=False):
        out = _Logits.apply(rows, weight) if tracked else _logits(rows, weight)
    return out.view(*hidden.shape[:-1], len(weight))


def logits_slice(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits (N, V) in `dtype`, outside autograd; a weight of another type is copied whole, so pass a slice of it."""
    if hidden.is_cuda and hidden.dtype == weight.dtype and hidden.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden, weight.mT, out_dtype=dtype)
    return product(hidden.to(dtype), weight.to(dtype))


def work_type(hidden: Tensor, weight: Tensor) -> torch.dtype:
    return torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32


def check_head(hidden: Tensor, weight: Tensor) -> None:
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be (..., M) and weight (V, M) with one M, got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if hidden.device != weight.device or not (hidden.is_floating_point() and weight.is_floating_point()):
        raise ValueError(
            f"hidden and weight must be floating and share a device, got {hidden.dtype} on {hidden.device} and "
            f"{weight.dtype} on {weight.device}"
        )


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    dtype = work_type(hidden, weight)
    if weight.dtype == dtype or hidden.is_cuda and hidden.dtype == weight.dtype:
        return logits_slice(hidden, weight, dtype)
    hidden = hidden.to(dtype)
    return torch.cat([logits_slice(hidden, part, dtype) for part in weight.split(VOCAB_SLICE)], dim=1)


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return _logits(hidden, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dlogits: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        need_dhidden, need_dweight = ctx.needs_input_grad
        dhidden = torch.zeros_like(hidden, dtype=dlogits.dtype) if need_dhidden else None
        dweight = torch.empty_like(weight) if need_dweight else None
        hidden_work = hidden.to(dlogits.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(weight), VOCAB_SLICE):
                part = slice(start, start + VOCAB_SLICE)
                dpart = dlogits[:, part].contiguous()
                if need_dhidden:
                    dhidden += product(dpart, weight[part].to(dlogits.dtype).mT)
                if need_dweight:
                    dweight[part] = product(dpart.mT, hidden_work.mT)
        return dhidden.to(hidden.dtype) if need_dhidden else None, dweight
