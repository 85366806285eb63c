"""Dense matrix products, by the fastest way that plain PyTorch has on the device.

PyTorch sends float32 products on a CPU to MKL. oneDNN, which it carries for bfloat16, is as exact; which
of them is faster depends on who made the CPU: MKL keeps its best kernels for Intel. Microseconds for a weight
2048 x 512 that is not in cache, torch 2.13, 2 threads:

    x.shape[0]                      1      2      8     64   4096
    AMD EPYC (Zen 5)  F.linear    252    386    378    828  47100
                      oneDNN       80    151    180    376  25000
                      (bfloat16)   82     73     86    198   8700     by oneDNN in either call
    Intel with AMX    F.linear    199    229      -   1012      equal
                      oneDNN      230    389      -   6663      equal

So an Intel CPU stays with MKL. On others a call of oneDNN costs 10 us where one of MKL costs 2, so small
products stay with MKL there too.
"""

import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .backends import tracing, tracked, without_autocast

# Where oneDNN overtakes MKL: at 1M products of matrices in cache (64 to 512 wide, 1 thread), and from 512 x
# 512 on for a weight that must come from memory, as each does in decoding.
PRODUCTS_MIN = 2**20
WEIGHTS_MIN = 2**18
_PLAIN = (Tensor, torch.nn.Parameter)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., K) @ weight (N, K).T, as `torch.nn.functional.linear` in value, gradient and autocast."""
    flat = x.reshape(-1, x.shape[-1])
    if not _takes_onednn(flat, weight) or torch.is_autocast_enabled(x.device.type):
        return torch.nn.functional.linear(x, weight)
    out = _Linear.apply(flat, weight) if tracked(x, weight) else _onednn(flat, weight)
    return out.view(*x.shape[:-1], weight.shape[0])


def matmul_nt(x: Tensor, weight: Tensor) -> Tensor:
    """x (R, K) @ weight (N, K).T, outside autograd; either may be a transposed view."""
    return _onednn(x, weight) if _takes_onednn(x, weight) else torch.mm(x, weight.mT)


def _onednn(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return matmul_nt(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        with without_autocast(x):
            dx = matmul_nt(dout, weight.mT) if ctx.needs_input_grad[0] else None
            dweight = matmul_nt(dout.mT, x.mT) if ctx.needs_input_grad[1] else None
        return dx, dweight


@cache
def _onednn_is_faster() -> bool:
    has_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_onednn and not is_intel(cpu_description())


def is_intel(description: str) -> bool:
    """Whether a CPU that describes itself so has MKL's best kernels."""
    return "GenuineIntel" in description


def cpu_description() -> str:
    """What names the CPU's maker: Linux' own text, elsewhere what Python knows (Windows: with the maker)."""
    try:
        return Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return platform.processor()


def _takes_onednn(x: Tensor, weight: Tensor) -> bool:
    """Plain float32 matrices on a CPU, large enough; a DTensor or a traced tensor goes PyTorch's own way."""
    return (
        x.dtype == weight.dtype == torch.float32
        and (weight.numel() >= WEIGHTS_MIN or x.shape[0] * weight.numel() >= PRODUCTS_MIN)
        and x.is_cpu
        and weight.is_cpu
        and type(x) in _PLAIN
        and type(weight) in _PLAIN
        and _onednn_is_faster()
        and not tracing()
    )
