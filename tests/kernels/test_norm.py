"""RMSNorm: the formula, its gradient in float64, and the type rules."""

import pytest
import torch

from minimax_kernels import rms_norm


def formula(x, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 33, 64), (0, 5, 8), (3, 16)])
@pytest.mark.parametrize("tracked", [False, True])
def test_it_is_the_formula_in_every_type_with_and_without_a_graph(dtype, shape, tracked):
    x = torch.randn(shape).to(dtype).requires_grad_(tracked)
    weight = torch.randn(shape[-1]).to(dtype)
    out = rms_norm(x, weight, eps=1e-5)
    assert out.dtype == dtype and out.shape == x.shape
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(out, formula(x, weight, 1e-5), rtol=2 * step, atol=2 * step)


def test_the_gradient_is_that_of_finite_differences():
    x = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, eps=1e-3), (x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_have_their_inputs_types_and_meet_autograd(dtype):
    x = torch.randn(2, 9, 32).to(dtype).requires_grad_()
    weight = torch.randn(32).to(dtype).requires_grad_()
    dy = torch.randn(2, 9, 32).to(dtype)
    ours = torch.autograd.grad(rms_norm(x, weight, eps=1e-6), (x, weight), dy)
    theirs = torch.autograd.grad(formula(x, weight, 1e-6), (x, weight), dy)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    for got, wanted in zip(ours, theirs, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def test_a_zero_vector_has_a_finite_gradient():
    x = torch.zeros(1, 8, requires_grad=True)
    rms_norm(x, torch.ones(8), eps=1e-5).backward(torch.ones(1, 8))
    torch.testing.assert_close(x.grad, torch.full((1, 8), 1e-5**-0.5))


def test_a_float32_weight_keeps_the_product_in_float32():
    x = torch.randn(2, 8).bfloat16()
    assert rms_norm(x, torch.ones(8), eps=1e-5).dtype == torch.float32


def test_inputs_are_left_as_they_were():
    x = torch.randn(4, 8)
    before = x.clone()
    rms_norm(x, torch.randn(8), eps=1e-5)
    assert torch.equal(x, before)


def test_another_width_is_refused():
    with pytest.raises(ValueError, match=r"\(8,\), the width of x, got \(4,\)"):
        rms_norm(torch.randn(2, 8), torch.ones(4), eps=1e-5)
