"""The experts' matrix product: every form against the definition, whatever the routing."""

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import error_budget
from torch import Tensor

from minimax_kernels import grouped_linear, linear
from minimax_kernels.gemm import matmul_nt

FORMS = ["loop", "grouped_mm"]
ROUTINGS = {
    "even": [4, 4, 4, 4],
    "one_idle": [5, 0, 7, 4],
    "all_to_one": [0, 0, 16, 0],
    "rows_left_over": [3, 2, 0, 4],
    "nobody": [0, 0, 0, 0],
}


def run(
    x: Tensor, weight: Tensor, counts: list[int], dout: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = grouped_linear(x, weight, torch.tensor(counts, device=x.device), backend=backend)
    return out.detach(), *torch.autograd.grad(out, (x, weight), dout)


def inputs(R: int = 16, E: int = 4, N: int = 24, K: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*shape, generator=rng) for shape in ((R, K), (E, N, K), (R, N)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("counts", ROUTINGS.values(), ids=ROUTINGS.keys())
@pytest.mark.parametrize("backend", [*FORMS, "auto"])
def test_every_form_meets_the_definition_in_value_and_gradients(
    backend: str, counts: list[int], dtype: torch.dtype, device: str
) -> None:
    x, weight, dout = (t.to(device, dtype) for t in inputs())
    found = run(x, weight, counts, dout, backend)
    plain = run(x, weight, counts, dout, "reference")
    exact = run(x.double(), weight.double(), counts, dout.double(), "reference")
    for name, value, near, true in zip(("out", "dx", "dweight"), found, plain, exact, strict=True):
        assert value.dtype == dtype and value.shape == true.shape, name
        assert (value.double() - true).abs().max() <= error_budget([near], true), name


@pytest.mark.parametrize("backend", FORMS)
def test_gradients_of_a_sum_are_accepted(backend: str) -> None:
    x, weight, _ = inputs()
    x.requires_grad_(), weight.requires_grad_()
    counts = torch.tensor([5, 0, 7, 4])
    grouped_linear(x, weight, counts, backend=backend).sum().backward()
    torch.testing.assert_close(x.grad[0], weight[0].detach().sum(0))
    assert torch.equal(weight.grad[1], torch.zeros_like(weight[1]))


@pytest.mark.parametrize("backend", FORMS)
def test_rows_of_no_expert_are_zero_and_get_no_gradient(backend: str) -> None:
    x, weight, dout = inputs()
    out, dx, _ = run(x, weight, ROUTINGS["rows_left_over"], dout, backend)
    assert out[:9].abs().min() > 0 and torch.equal(out[9:], torch.zeros_like(out[9:]))
    assert dx[:9].abs().min() > 0 and torch.equal(dx[9:], torch.zeros_like(dx[9:]))


@pytest.mark.parametrize("backend", [*FORMS, "reference"])
def test_an_empty_input_stays_in_the_graph(backend: str) -> None:
    x, weight, dout = inputs(R=0)
    out, dx, dweight = run(x, weight, [0, 0, 0, 0], dout, backend)
    assert out.shape == (0, 24) and dx.shape == (0, 32)
    assert torch.equal(dweight, torch.zeros_like(weight))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 3), st.randoms())
def test_reordering_the_experts_reorders_the_rows(counts: list[int], spare: int, random: Random) -> None:
    x, weight, _ = inputs(R=sum(counts) + spare, E=len(counts), N=3, K=5)
    order = random.sample(range(len(counts)), len(counts))
    blocks = list(x.split([*counts, spare]))
    moved = torch.cat([blocks[e] for e in order] + blocks[-1:])
    out = grouped_linear(x, weight, torch.tensor(counts)).split([*counts, spare])
    out_moved = grouped_linear(moved, weight[order], torch.tensor([counts[e] for e in order]))
    torch.testing.assert_close(out_moved, torch.cat([out[e] for e in order] + list(out[-1:])))


def test_the_loop_passes_gradcheck() -> None:
    x, weight, _ = (t.double().requires_grad_() for t in inputs(R=7, E=3, N=2, K=3))
    counts = torch.tensor([2, 0, 4])
    assert torch.autograd.gradcheck(lambda x, weight: grouped_linear(x, weight, counts), (x, weight))


def test_decoding_reads_only_the_experts_in_use() -> None:
    x, weight, _ = inputs(R=2)
    weight[0], weight[2] = float("nan"), float("nan")
    assert grouped_linear(x, weight, torch.tensor([0, 1, 0, 1])).isfinite().all()


def test_autocast_computes_in_its_own_type_and_gradients_keep_theirs() -> None:
    x, weight, _ = inputs()
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = grouped_linear(x, weight, torch.tensor([4, 4, 4, 4]))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert weight.grad.dtype == torch.float32


BAD = {
    "at most R = 16": lambda x, w: grouped_linear(x, w, torch.tensor([9, 9, 0, 0])),
    "0 or more": lambda x, w: grouped_linear(x, w, torch.tensor([9, -1, 0, 0])),
    "one count for each expert": lambda x, w: grouped_linear(x, w, torch.tensor([9, 1])),
    "int32 or int64": lambda x, w: grouped_linear(x, w, torch.ones(4)),
    "one K": lambda x, w: grouped_linear(x[:, 1:], w, torch.tensor([4, 4, 4, 4])),
    "one floating type": lambda x, w: grouped_linear(x.double(), w, torch.tensor([4, 4, 4, 4])),
    "backend 'triton' is unknown": lambda x, w: grouped_linear(x, w, torch.ones(4).int(), backend="triton"),
    "multiples of 4, got 32 and 23": lambda x, w: grouped_linear(
        x, w[:, 1:].contiguous(), torch.tensor([4, 4, 4, 4]), backend="grouped_mm"
    ),
}


@pytest.mark.parametrize("rule", BAD)
def test_bad_input_is_refused_with_the_rule(rule: str) -> None:
    x, weight, _ = inputs()
    with pytest.raises(ValueError, match=rule):
        BAD[rule](x, weight)


@pytest.mark.parametrize("shape", [(1, 600, 500), (3, 600, 500), (700, 40, 60), (2, 3, 5)], ids=str)
def test_linear_is_as_exact_as_pytorchs_in_value_and_gradients(shape: tuple[int, int, int]) -> None:
    """Large enough for oneDNN in float32 (the first three), and too small for it."""
    R, N, K = shape
    x, weight, dout = (t[0] if t.ndim == 3 else t for t in inputs(R=R, E=1, N=N, K=K))
    leaves = x.reshape(1, R, K).requires_grad_(), weight.requires_grad_()
    exact = dout.double() @ weight.detach().double(), dout.double().T @ x.double()
    out = linear(*leaves)
    assert out.shape == (1, R, N)
    dx, dweight = torch.autograd.grad(out, leaves, dout[None])
    pairs = [
        (out.detach()[0], x @ weight.T.detach(), x.double() @ weight.double().T.detach()),
        (dx[0], dout @ weight.detach(), exact[0]),
        (dweight, dout.T @ x, exact[1]),
        (matmul_nt(dout.T, x.T), dout.T @ x, exact[1]),
    ]
    for value, plain, true in pairs:
        assert (value.double() - true).abs().max() <= error_budget([plain], true)


def test_linear_follows_autocast_and_mixed_shapes_like_pytorchs() -> None:
    x, weight = torch.randn(2, 3, 600), torch.randn(500, 600)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    assert linear(x[:0], weight).shape == (0, 3, 500)
    assert linear(x[0, 0], weight).shape == (500,)
