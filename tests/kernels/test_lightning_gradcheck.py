"""Gradients of lightning attention: gradcheck in float64, identities of a multilinear function elsewhere."""

import pytest
import torch
from support import backend_results, lightning_inputs
from torch import Tensor

from minimax_kernels import lightning_attention


@pytest.mark.parametrize("lengths", [None, [3, 0, 1, 66]], ids=["dense", "packed"])
@pytest.mark.parametrize("name", ["reference", "chunked"])
def test_float64_gradients_pass_gradcheck(name: str, lengths: list[int] | None) -> None:
    inputs = lightning_inputs(B=2, T=3, H=2, Dk=2, Dv=3, lengths=lengths, dtype=torch.float64)

    def run(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return lightning_attention(
            q, k, v, inputs.log_decay, initial_state=state, cu_seqlens=inputs.cu_seqlens, backend=name
        )

    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.state)]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("lengths", [None, [70, 0, 1, 129]], ids=["dense", "packed"])
def test_gradients_obey_the_identities_of_a_multilinear_function(
    backend: str, device: str, lengths: list[int] | None
) -> None:
    """The results are linear in (v, state) together, and out is linear in q: Euler's identity for each."""
    inputs = lightning_inputs(T=200, lengths=lengths, device=device)
    found = {name: x.double() for name, x in backend_results(inputs, backend).items()}
    through_out = (inputs.dout.double() * found["out"]).sum()
    through_last = (inputs.dlast.double() * found["last"]).sum()
    by_value = (found["dv"] * inputs.v).sum() + (found["dstate"] * inputs.state).sum()
    by_query = (found["dq"] * inputs.q).sum()
    scale = (inputs.dout * found["out"]).abs().sum() + (inputs.dlast * found["last"]).abs().sum()
    assert abs(by_value - through_out - through_last) < 1e-6 * scale
    assert abs(by_query - through_out) < 1e-6 * scale


@pytest.mark.parametrize("wanted", ["q", "k", "v", "state"])
def test_one_gradient_alone_equals_the_same_gradient_among_all(
    backend: str, device: str, wanted: str
) -> None:
    inputs = lightning_inputs(T=70, device=device)
    together = backend_results(inputs, backend)[f"d{wanted}"]
    leaf = getattr(inputs, wanted).detach().clone().requires_grad_()
    arguments = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "state": inputs.state} | {wanted: leaf}
    arguments = {name: x if x is leaf else x.detach() for name, x in arguments.items()}
    arguments["initial_state"] = arguments.pop("state")
    out, last = lightning_attention(log_decay=inputs.log_decay, backend=backend, **arguments)
    results = [(out, inputs.dout), (last, inputs.dlast)]
    results = [(x, dx) for x, dx in results if x.requires_grad]
    (alone,) = torch.autograd.grad([x for x, _ in results], leaf, [dx for _, dx in results])
    assert torch.equal(alone, together)


def test_a_result_that_is_not_used_sends_no_gradient(backend: str, device: str) -> None:
    inputs = lightning_inputs(T=70, device=device)
    q, v = inputs.q.requires_grad_(), inputs.v.requires_grad_()
    out, last = lightning_attention(q, inputs.k, v, inputs.log_decay, backend=backend)
    (from_out,) = torch.autograd.grad(out, v, inputs.dout, retain_graph=True)
    (from_last,) = torch.autograd.grad(last, v, inputs.dlast, retain_graph=True)
    (from_both,) = torch.autograd.grad([out, last], v, [inputs.dout, inputs.dlast])
    torch.testing.assert_close(from_out + from_last, from_both, rtol=1e-5, atol=1e-5)
