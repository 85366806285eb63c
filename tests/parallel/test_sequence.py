"""A sequence cut over ranks gives one process's lightning attention, forward and backward."""

import pytest
import torch
from ranks import run_on_ranks
from torch import distributed as dist

from minimax_hybrid.lightning_attention import layer_log_decay
from minimax_hybrid.parallel.sequence import lightning_attention_over_ranks
from minimax_kernels import lightning_attention

pytestmark = pytest.mark.slow


def pieces_agree(lengths: str, dtype: str) -> None:
    """The last layer of eight, whose slowest head hardly forgets, and the first one."""
    sizes = [int(length) for length in lengths.split(",")]
    B, T, H, D = 2, sum(sizes), 4, 16
    tolerance = {"float64": 1e-12, "float32": 1e-6}[dtype]
    start = sum(sizes[: dist.get_rank()])
    mine = slice(start, start + sizes[dist.get_rank()])
    for layer in (0, 7):
        torch.manual_seed(layer)
        whole = [torch.randn(B, T, H, D, dtype=getattr(torch, dtype), requires_grad=True) for _ in "qkv"]
        dout = torch.randn_like(whole[0])
        log_decay = layer_log_decay(H, layer, 8, device=torch.device("cpu"))
        wanted, state = lightning_attention(*whole, log_decay)
        wanted.backward(dout)
        piece = [x.detach()[:, mine].clone().requires_grad_() for x in whole]
        found, final = lightning_attention_over_ranks(*piece, log_decay)
        found.backward(dout[:, mine])
        pairs = [(x.grad, y.grad[:, mine]) for x, y in zip(piece, whole, strict=True)]
        pairs.append((found, wanted[:, mine]))
        if dist.get_rank() == len(sizes) - 1:
            pairs.append((final, state))
        for x, y in pairs:
            assert (x - y).norm() <= tolerance * y.norm()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("lengths", ["128,128", "37,150", "100,1,70"])
def test_pieces_on_ranks_equal_the_whole_sequence(lengths: str, dtype: str) -> None:
    run_on_ranks(pieces_agree, lengths, dtype, ranks=lengths.count(",") + 1)
