"""Log-probabilities of given tokens by chunks of rows and vocabulary, with their own backward.

With z = hidden @ weight.T / temperature, and over the whole vocabulary m = max z, s = sum exp(z - m):

    log p[j]  = z[j] - m - log s
    entropy   = log s - sum exp(z - m) (z - m) / s
    d log p[target] / dz[j] = [j = target] - p[j]
    d entropy       / dz[j] = -p[j] (log p[j] + entropy)

Forward and backward each make the logits of a chunk, use them and drop them. The vocabulary is the outer
loop, so a chunk of the weight, and of its gradient in float32, is held once for all rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..gemm import product
from .logits import logits_slice, work_type


@dataclass(frozen=True)
class Chunks:
    temperature: float
    rows: int
    vocab: int

    def over(self, hidden: Tensor, weight: Tensor) -> "tuple[range, range]":
        return range(0, len(weight), self.vocab), range(0, len(hidden), self.rows)


class TokenLogProbs(torch.autograd.Function):
    """(log_probs (N,), entropy (N,) or None) from hidden (N, M), weight (V, M), targets (N,) in [0, V)."""

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, chunks: Chunks, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        with torch.autocast(hidden.device.type, enabled=False):
            top, log_sum, target_logit, entropy = _statistics(hidden, weight, targets, chunks, with_entropy)
        ctx.chunks = chunks
        ctx.save_for_backward(hidden, weight, targets, top, log_sum, entropy)
        return target_logit - top - log_sum, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx, dlog_probs: Tensor | None, dentropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, targets, top, log_sum, entropy = ctx.saved_tensors
        need_dhidden, need_dweight = ctx.needs_input_grad[:2]
        work = top.dtype
        if dlog_probs is None:
            dlog_probs = torch.zeros_like(top)
        dhidden = torch.zeros_like(hidden, dtype=work) if need_dhidden else None
        dweight = torch.empty_like(weight) if need_dweight else None
        vocab_starts, row_starts = ctx.chunks.over(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            for v in vocab_starts:
                weight_chunk = weight[v : v + ctx.chunks.vocab]  # (Vc, M)
                weight_work = weight_chunk.to(work)
                dweight_chunk = torch.zeros_like(weight_work) if need_dweight else None
                for n in row_starts:
                    rows = slice(n, n + ctx.chunks.rows)
                    z = logits_slice(hidden[rows], weight_chunk, work)  # (Nc, Vc)
                    log_p = z.div_(ctx.chunks.temperature).sub_((top[rows] + log_sum[rows])[:, None])
                    dz = _dlogits(log_p, dlog_probs[rows], dentropy, entropy, rows)
                    inside, column = _find(targets[rows], v, len(weight_chunk))
                    dz.scatter_add_(1, column[:, None], (dlog_probs[rows] * inside)[:, None])
                    dz.div_(ctx.chunks.temperature)
                    if need_dhidden:
                        dhidden[rows] += product(dz, weight_work.mT)
                    if need_dweight:
                        dweight_chunk += product(dz.mT, hidden[rows].to(work).mT)
                if need_dweight:
                    dweight[v : v + ctx.chunks.vocab] = dweight_chunk
        return dhidden.to(hidden.dtype) if need_dhidden else None, dweight, None, None, None


def _statistics(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunks: Chunks, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Of every row: m, log s, the target's z, and the entropy if asked for."""
    work = work_type(hidden, weight)
    top = torch.full((len(hidden),), torch.finfo(work).min, dtype=work, device=hidden.device)
    # s, sum exp(z - m) (z - m), z[target]
    total, moment, target_logit = (torch.zeros_like(top) for _ in range(3))
    vocab_starts, row_starts = chunks.over(hidden, weight)
    for v in vocab_starts:
        weight_chunk = weight[v : v + chunks.vocab]
        for n in row_starts:
            rows = slice(n, n + chunks.rows)
            z = logits_slice(hidden[rows], weight_chunk, work).div_(chunks.temperature)  # (Nc, Vc)
            inside, column = _find(targets[rows], v, len(weight_chunk))
            target_logit[rows] += z.gather(1, column[:, None])[:, 0] * inside
            before = top[rows].clone()
            top[rows] = torch.maximum(before, z.amax(1))
            drop = before - top[rows]
            z.sub_(top[rows, None])
            p = z.exp() if with_entropy else z.exp_()
            if with_entropy:
                moment[rows] = drop.exp() * (moment[rows] + total[rows] * drop) + z.mul_(p).sum(1)
            total[rows] = drop.exp() * total[rows] + p.sum(1)
    log_sum = total.log()
    return top, log_sum, target_logit, log_sum - moment / total if with_entropy else None


def _dlogits(
    log_p: Tensor, dlog_probs: Tensor, dentropy: Tensor | None, entropy: Tensor | None, rows: slice
) -> Tensor:
    """The part of dz that every column has; `log_p` is overwritten."""
    if dentropy is None or entropy is None:
        return log_p.exp_().mul_(-dlog_probs[:, None])
    p = log_p.exp()
    return p.mul_(log_p.add_(entropy[rows, None]).mul_(-dentropy[rows, None]).sub_(dlog_probs[:, None]))


def _find(targets: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Whether each target lies among `size` columns from `start`, and its column there (0 if not)."""
    column = targets - start
    inside = (column >= 0) & (column < size)
    return inside, column * inside
