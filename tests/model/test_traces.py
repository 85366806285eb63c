"""Claims about torch.compile and torch.export: one graph, and the numbers of the eager model."""

from collections.abc import Callable

import pytest
import torch
from tiny import V, assert_close, model, tokens
from torch import Tensor

from minimax_kernels import grouped_linear

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = dict(num_hidden_layers=2, attn_type_list=[0, 1])
NET = model(**SIZES)
MASKS = {
    "left": torch.arange(70) >= torch.tensor([[5], [0]]),
    "right": torch.arange(70) < torch.tensor([[66], [70]]),
    "gaps": torch.arange(70).expand(2, 70) % torch.tensor([[7], [90]]) != 3,
    "full": torch.ones(2, 70, dtype=torch.bool),
    "all": torch.arange(70) < torch.tensor([[0], [70]]),
}


@pytest.fixture(autouse=True)
def no_graph_is_kept() -> None:
    torch._dynamo.reset()


def forward(ids: Tensor) -> Tensor:
    return NET(ids, use_cache=False).logits


def padded(ids: Tensor, mask: Tensor) -> Tensor:
    return NET(ids, attention_mask=mask, use_cache=False).logits


def loss(ids: Tensor) -> Tensor:
    return NET(ids, labels=ids, use_cache=False, output_router_logits=True).loss


@pytest.mark.parametrize("call", [forward, padded, loss])
def test_one_graph_holds_it_all(call: Callable[..., Tensor]) -> None:
    ids = tokens(2, 70)
    inputs = (ids, MASKS["left"].long()) if call is padded else (ids,)
    found = torch._dynamo.explain(call)(*inputs)
    assert (found.graph_break_count, found.graph_count) == (0, 1), found.break_reasons


@torch.no_grad()
@pytest.mark.parametrize("T", [1, 33, 70])
def test_a_compiled_forward_gives_the_eager_logits(T: int) -> None:
    ids = tokens(2, T)
    assert_close(torch.compile(forward, fullgraph=True, backend="aot_eager")(ids), forward(ids))


@torch.no_grad()
def test_a_compiled_forward_follows_padding_wherever_it_lies() -> None:
    """One graph serves every mask, the one that hides nothing too."""
    net, ids = model(**SIZES), tokens(2, 70)

    def call(mask: Tensor) -> Tensor:
        return net(ids, attention_mask=mask, use_cache=False).logits

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for name, mask in MASKS.items():
        found, wanted = compiled(mask.long()), call(mask.long())
        assert_close(found[mask], wanted[mask])
        assert found.isfinite().all(), name


@pytest.mark.slow
def test_a_compiled_training_step_has_the_eager_gradients() -> None:
    ids, found = tokens(2, 70), []
    for call in (torch.compile(loss, fullgraph=True, backend="aot_eager"), loss):
        NET.zero_grad()
        value = call(ids)
        value.backward()
        found.append((value.detach(), {name: p.grad.clone() for name, p in NET.named_parameters()}))
    (value, grads), (wanted, exact) = found
    assert_close(value, wanted)
    for name, grad in exact.items():
        assert_close(grads[name], grad)


@pytest.mark.slow
@torch.no_grad()
def test_packed_documents_may_break_the_graph_and_keep_their_numbers() -> None:
    ids = tokens(1, 70)
    position_ids = torch.cat([torch.arange(30), torch.arange(40)])[None]

    def call(position_ids: Tensor) -> Tensor:
        return NET(ids, position_ids=position_ids, use_cache=False).logits

    assert_close(torch.compile(call, backend="aot_eager")(position_ids), call(position_ids))


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_gives_the_eager_logits(strict: bool, tmp_path) -> None:
    net, ids = model(**SIZES), tokens(2, 33)
    program = torch.export.export(net, (ids,), {"use_cache": False}, strict=strict)
    torch.export.save(program, tmp_path / "model.pt2")
    wanted = net(ids, use_cache=False).logits  # tracing left nothing behind in the eager model
    for again in (program, torch.export.load(tmp_path / "model.pt2")):
        assert_close(again.module()(ids, use_cache=False).logits, wanted)


def test_token_ids_are_checked_where_a_user_meets_the_check() -> None:
    with torch.no_grad():
        torch.export.export(NET, (tokens(2, 33),), {"use_cache": False}, strict=False)
    with pytest.raises(ValueError, match=f"token id {V} is not in the vocabulary"):
        forward(torch.tensor([[3, V]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_experts_in_a_trace_have_the_bits_of_the_eager_ones(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(20, 24, dtype=dtype), torch.randn(3, 40, 24, dtype=dtype)
    counts = torch.tensor([7, 0, 10])  # the last three belong to no expert
    found = []
    for call in (torch.compile(grouped_linear, fullgraph=True, backend="aot_eager"), grouped_linear):
        inputs = [value.clone().requires_grad_() for value in (x, weight)]
        out = call(*inputs, counts)
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), inputs)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
