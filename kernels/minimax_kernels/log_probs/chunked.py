"""Log-probabilities of given tokens by chunks of tokens and vocabulary, with their own backward.

With z = hidden @ weight.T / temperature, and over the whole vocabulary m = max z, s = sum exp(z - m):

    log p[j]  = z[j] - m - log s
    entropy   = log s - sum exp(z - m) (z - m) / s
    d log p[target] / dz[j] = [j = target] - p[j]
    d entropy       / dz[j] = -p[j] (log p[j] + entropy)

Forward and backward each make the logits of a chunk, use them and drop them. The vocabulary is the outer
loop, so a chunk of the weight, and of its gradient, is turned into float32 once for all tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..backends import accumulation_dtype, full_float32
from ..gemm import matmul_nt
from ..head import logits_slice


@dataclass(frozen=True)
class Chunks:
    temperature: float
    tokens: int
    vocab: int

    def of_tokens(self, hidden: Tensor) -> list[slice]:
        return [slice(n, n + self.tokens) for n in range(0, len(hidden), self.tokens)]

    def of_vocab(self, weight: Tensor) -> list[slice]:
        return [slice(v, v + self.vocab) for v in range(0, len(weight), self.vocab)]


class TokenLogProbs(torch.autograd.Function):
    """(log_probs (N,), entropy (N,) or None) from hidden (N, M), weight (V, M), targets (N,) in [0, V)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunks: Chunks, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.chunks = chunks
        sums = _Sums.empty(len(hidden), accumulation_dtype(hidden, weight), hidden.device)
        with full_float32(hidden):
            for columns in chunks.of_vocab(weight):
                for chunk in chunks.of_tokens(hidden):
                    z = _scaled_logits(hidden[chunk], weight[columns], sums.top.dtype, chunks)
                    sums.add(z, chunk, targets[chunk] - columns.start, with_entropy)
                    del z
        log_sum = sums.total.log()
        entropy = log_sum - sums.moment / sums.total if with_entropy else None
        ctx.save_for_backward(hidden, weight, targets, sums.top + log_sum, entropy)
        return sums.target - sums.top - log_sum, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dlog_probs: Tensor | None, dentropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        need_dhidden, need_dweight = ctx.needs_input_grad[:2]
        work = normaliser.dtype
        if dlog_probs is None:
            dlog_probs = torch.zeros_like(normaliser)
        dhidden = torch.zeros_like(hidden, dtype=work) if need_dhidden else None
        dweight = torch.empty_like(weight) if need_dweight else None
        with full_float32(hidden):
            for columns in ctx.chunks.of_vocab(weight):
                part = weight[columns]  # (Vc, M)
                part_work = part.to(work)
                dpart = None
                for chunk in ctx.chunks.of_tokens(hidden):
                    log_p = _scaled_logits(hidden[chunk], part, work, ctx.chunks)
                    log_p.sub_(normaliser[chunk, None])
                    if dentropy is None:
                        dz = log_p.exp_().mul_(-dlog_probs[chunk, None])
                    else:
                        dz = _dz_with_entropy(log_p, dlog_probs[chunk], dentropy[chunk], entropy[chunk])
                    del log_p
                    inside, column = _find(targets[chunk] - columns.start, len(part))
                    dz.scatter_add_(1, column[:, None], (dlog_probs[chunk] * inside)[:, None])
                    dz.div_(ctx.chunks.temperature)
                    if dhidden is not None:
                        dhidden[chunk] += matmul_nt(dz, part_work.mT)
                    if dweight is not None:
                        more = matmul_nt(dz.mT, hidden[chunk].to(work).mT)
                        dpart = more if dpart is None else dpart.add_(more)
                        del more
                    del dz
                if dweight is not None:
                    # without tokens there is none
                    dweight[columns] = 0 if dpart is None else dpart
        return None if dhidden is None else dhidden.to(hidden.dtype), dweight, None, None, None


@dataclass
class _Sums:
    """What each token has gathered from the columns seen so far, (N,) each."""

    top: Tensor  # m
    total: Tensor  # s
    moment: Tensor  # sum exp(z - m) (z - m)
    target: Tensor  # z[target], 0 until it is seen

    @classmethod
    def empty(cls, N: int, dtype: torch.dtype, device: torch.device) -> "_Sums":
        top = torch.full((N,), torch.finfo(dtype).min, dtype=dtype, device=device)
        return cls(top, *(torch.zeros_like(top) for _ in range(3)))

    def add(self, z: Tensor, chunk: slice, column: Tensor, with_entropy: bool) -> None:
        """Take in logits (Nc, Vc), overwriting them; a target is at its `column` (Nc,) if that is in them."""
        inside, column = _find(column, z.shape[1])
        self.target[chunk] += z.gather(1, column[:, None])[:, 0] * inside
        top = torch.maximum(self.top[chunk], z.amax(1))
        drop = self.top[chunk] - top
        scale = drop.exp()
        z.sub_(top[:, None])
        if with_entropy:
            p = z.exp()
            self.moment[chunk] = scale * (self.moment[chunk] + self.total[chunk] * drop) + z.mul_(p).sum(1)
        else:
            p = z.exp_()
        self.total[chunk] = scale * self.total[chunk] + p.sum(1)
        self.top[chunk] = top


def _scaled_logits(hidden: Tensor, weight: Tensor, dtype: torch.dtype, chunks: Chunks) -> Tensor:
    return logits_slice(hidden, weight, dtype).div_(chunks.temperature)


def _dz_with_entropy(log_p: Tensor, dlog_probs: Tensor, dentropy: Tensor, entropy: Tensor) -> Tensor:
    """The part of dz that every column has, (Nc, Vc); `log_p` is overwritten."""
    p = log_p.exp()
    return p.mul_(log_p.add_(entropy[:, None]).mul_(-dentropy[:, None]).sub_(dlog_probs[:, None]))


def _find(column: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Which columns lie in [0, size), and the column itself (0 where it does not)."""
    inside = (column >= 0) & (column < size)
    return inside, column * inside
