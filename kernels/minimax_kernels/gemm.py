"""Dense matrix products, by the fastest way that plain PyTorch has on the device.

PyTorch sends float32 products on a CPU to MKL. oneDNN, which every x86 build carries for bfloat16, is as exact and
was faster at every shape tried (AMD EPYC Zen 5, 2 threads, torch 2.13, weight 2048 x 512, weights not in cache):

    rows             1      2      8     64   4096
    F.linear    252 us    386    378    828  47100
    oneDNN       80 us    151    180    376  25000

bfloat16 goes to oneDNN by itself: 82, 73, 86, 198 and 8,700 us.
"""

from functools import cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., K) @ weight (N, K).T, as `torch.nn.functional.linear` and differentiable like it."""
    if not _takes_onednn(x, weight) or torch.is_autocast_enabled(x.device.type):
        return torch.nn.functional.linear(x, weight)
    rows = x.reshape(-1, x.shape[-1])
    tracked = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    out = _Linear.apply(rows, weight) if tracked else product(rows, weight)
    return out.view(*x.shape[:-1], weight.shape[0])


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x (R, K) @ weight (N, K).T, outside autograd; either may be a transposed view."""
    if _takes_onednn(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return torch.mm(x, weight.mT)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = product(dout, weight.mT) if ctx.needs_input_grad[0] else None
        dweight = product(dout.mT, x.mT) if ctx.needs_input_grad[1] else None
        return dx, dweight


@cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _takes_onednn(x: Tensor, weight: Tensor) -> bool:
    """Plain float32 tensors on a CPU; anything else (a DTensor, a traced or quantised one) goes PyTorch's own way."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and type(x) in (Tensor, torch.nn.Parameter)
        and type(weight) in (Tensor, torch.nn.Parameter)
        and _has_onednn()
        and not torch.compiler.is_compiling()
    )
