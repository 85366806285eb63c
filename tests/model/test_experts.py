"""Claims about the experts: a graph that routing leaves alone, a float32 router, a loss blind to padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import assert_close, config, left_padded, model, prefilled, tokens
from torch import Tensor, nn

from minimax_hybrid.experts import (
    Experts,
    MixtureOfExperts,
    Router,
    SharedExpert,
    load_balancing_loss,
    mix_shared,
)

E, A, M, F = 4, 2, 32, 16


def choices(router_logits: tuple[Tensor, ...]) -> list[Tensor]:
    """The experts that a router chooses by these logits."""
    return [logits.topk(A)[1] for logits in router_logits]


def mixture(*, seed: int = 0, **changes: object) -> MixtureOfExperts:
    torch.manual_seed(seed)
    experts = MixtureOfExperts(config(**changes))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    return experts


def rows(N: int, *, seed: int = 1) -> Tensor:
    return torch.randn(N, M, generator=torch.Generator().manual_seed(seed))


def definition(experts: MixtureOfExperts, x: Tensor) -> Tensor:
    """The equations of the module, one token at a time."""
    outs = []
    for row in x:
        p = (experts.gate.weight @ row).softmax(-1)
        weights, chosen = p.topk(A)
        out = torch.zeros(M)
        for weight, e in zip(weights / weights.sum(), chosen, strict=True):
            w1, w3 = experts.experts.gate_up_proj[e].chunk(2)
            w2 = experts.experts.down_proj[e]
            out = out + weight * (w2 @ (nn.functional.silu(w1 @ row) * (w3 @ row)))
        outs.append(out)
    return torch.stack(outs)


def test_the_mixture_is_its_equations() -> None:
    experts, x = mixture(), rows(9)
    found, logits, _ = experts(x.view(3, 3, M))
    assert_close(found.view(9, M), definition(experts, x))
    assert_close(logits, x @ experts.gate.weight.T)


@given(st.permutations(range(9)))
def test_the_order_of_tokens_does_not_matter(order: list[int]) -> None:
    experts, x = mixture(), rows(9)
    assert_close(experts(x[None, order])[0], experts(x[None])[0][:, order])


@given(st.permutations(range(E)))
def test_the_order_of_experts_does_not_matter(order: list[int]) -> None:
    experts, other, x = mixture(), mixture(seed=1), rows(9)
    with torch.no_grad():
        for a, b in zip(experts.parameters(), other.parameters(), strict=True):
            b.copy_(a[order])
    assert_close(other(x[None])[0], experts(x[None])[0])


# The graph


def force(experts: MixtureOfExperts, chosen: list[int]) -> None:
    """A router that sends every token with a positive first channel to these experts."""
    with torch.no_grad():
        experts.gate.weight.zero_()
        experts.gate.weight[chosen, 0] = 5


def gradients(experts: MixtureOfExperts, x: Tensor) -> dict[str, Tensor | None]:
    entered = []
    hooks = [m.register_forward_hook(lambda module, *_: entered.append(module)) for m in experts.modules()]
    experts.zero_grad()
    out, logits, _ = experts(x)
    assert out.requires_grad and out.shape == x.shape and logits.shape == (x[..., 0].numel(), E)
    (out.sum() + logits.sum()).backward()
    for hook in hooks:
        hook.remove()
    assert len(entered) == len(set(entered)) == len(list(experts.modules()))
    return {name: p.grad for name, p in experts.named_parameters()}


@pytest.mark.parametrize("chosen", [[0, 1], [0, 2], [1, 3]], ids=str)
def test_an_expert_without_tokens_has_a_gradient_of_zeros(chosen: list[int]) -> None:
    experts, x = mixture(), rows(5).abs()[None]
    force(experts, chosen)
    for name, grad in gradients(experts, x).items():
        assert grad is not None, name
        if name != "gate.weight":
            busy = [e for e in range(E) if grad[e].abs().sum() > 0]
            assert busy == chosen, name


def test_an_empty_input_stays_in_the_graph() -> None:
    for shape in ((0, 3, M), (2, 0, M)):
        for name, grad in gradients(mixture(), torch.zeros(shape)).items():
            assert grad is not None and grad.eq(0).all(), name


def test_all_tokens_may_go_to_one_expert() -> None:
    experts, x = mixture(num_experts_per_tok=1), rows(7).abs()
    force(experts, [2])
    found = gradients(experts, x[None])
    assert all(grad is not None for grad in found.values())
    w1, w3 = experts.experts.gate_up_proj[2].chunk(2)
    wanted = (nn.functional.silu(x @ w1.T) * (x @ w3.T)) @ experts.experts.down_proj[2].T
    assert_close(experts(x[None])[0][0], wanted)


def test_every_parameter_of_a_model_has_a_gradient_whatever_the_routing() -> None:
    net = model()
    force(net.model.layers[0].block_sparse_moe, [0, 1])
    net(tokens(2, 9), labels=tokens(2, 9)).loss.backward()
    assert all(p.grad is not None for p in net.parameters())


# The router


@pytest.mark.parametrize("way", ["bf16 weights", "bf16 input", "autocast"])
def test_the_router_computes_in_float32(way: str) -> None:
    router = Router(config())
    nn.init.normal_(router.weight, std=0.3)
    x = rows(64)
    if way == "bf16 weights":
        router.to(torch.bfloat16)
    if way != "autocast":
        x = x.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        logits, weights, chosen = router(x)
    wanted = x.float() @ router.weight.float().T
    assert logits.dtype == weights.dtype == torch.float32
    assert_close(logits, wanted, 1e-6)
    assert torch.equal(chosen, wanted.topk(A)[1])
    assert_close(weights, wanted.topk(A)[0].softmax(-1), 1e-6)


def test_a_loaded_bf16_model_keeps_its_routers_in_float32(tmp_path) -> None:
    model().save_pretrained(tmp_path)
    net = type(model()).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for name, p in net.named_parameters() if "moe.gate" in name} == {torch.float32}
    assert net.model.embed_tokens.weight.dtype == torch.bfloat16


def test_replayed_experts_get_weights_from_the_live_router() -> None:
    experts, x = mixture(), rows(6)[None]
    _, logits, _ = experts(x)
    own = logits.topk(A)[1]
    assert torch.equal(experts(x, own)[0], experts(x)[0])
    other = torch.stack([own[:, 1], (own[:, 1] + 1) % E], dim=1)
    _, weights, chosen = experts.gate(x[0], other)
    assert torch.equal(chosen, other)
    assert_close(weights, logits.gather(1, other).softmax(-1), 1e-6)


def test_jitter_is_for_training_only() -> None:
    experts, x = mixture(router_jitter_noise=0.2), rows(6)[None]
    experts.eval()
    assert torch.equal(experts(x)[0], experts(x)[0])
    experts.train()
    assert not torch.equal(experts(x)[0], experts(x)[0])


# Routing replay through the model


def test_routing_that_is_replayed_gives_the_same_logits() -> None:
    net, ids = model(), tokens(2, 9)
    out = net(ids, output_router_logits=True)
    chosen = torch.stack([logits.topk(A)[1] for logits in out.router_logits], 1).view(2, 9, -1, A)
    assert torch.equal(net(ids, routed_experts=chosen).logits, out.logits)
    assert torch.equal(net.log_probs(ids, routed_experts=chosen), net.log_probs(ids))
    flipped = (chosen + 1) % E
    assert (net(ids, routed_experts=flipped).logits - out.logits).abs().max() > 1e-2
    assert (net.log_probs(ids, routed_experts=flipped) - net.log_probs(ids)).abs().max() > 1e-2


@pytest.mark.parametrize(
    "shape", [(2, 8, 4, A), (1, 9, 4, A), (2, 9, 3, A), (2, 9, 4, 1), (18, 4, A)], ids=str
)
def test_routing_of_other_positions_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"routed_experts must be \(B, T, L, A\) = \(2, 9, 4, 2\)"):
        model()(tokens(2, 9), routed_experts=torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("expert", [-1, E])
def test_routing_to_an_expert_that_is_not_there_is_refused(expert: int) -> None:
    chosen = torch.zeros(2, 9, 4, A, dtype=torch.long)
    chosen[1, 2, 3, 1] = expert
    with pytest.raises(ValueError, match=f"routed_experts holds {expert}"):
        model()(tokens(2, 9), routed_experts=chosen)


# The load-balancing loss


def test_an_even_router_has_a_loss_of_the_experts_per_token() -> None:
    even = tuple(torch.zeros(10, E) for _ in range(3))
    assert load_balancing_loss(even, choices(even)).item() == pytest.approx(2.0)


@pytest.mark.parametrize("pads", [3, 30])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_move_the_loss(pads: int, side: str) -> None:
    net = model()
    documents = tokens(2, 11)
    padding = torch.zeros(2, pads, dtype=torch.long)
    order = (padding, documents) if side == "left" else (documents, padding)
    ids = torch.cat(order, dim=1)
    mask = torch.cat([torch.full_like(x, int(x is documents)) for x in order], dim=1)
    found = []
    for inputs, m in ((documents, None), (ids, mask)):
        net.zero_grad()
        loss = net(inputs, attention_mask=m, output_router_logits=True).aux_loss
        loss.backward()
        grads = [net.model.layers[i].block_sparse_moe.gate.weight.grad for i in range(4)]
        found.append((loss.detach(), torch.stack(grads)))
    (loss, grad), (padded_loss, padded_grad) = found
    assert grad.abs().max() > 1e-5
    assert_close(padded_loss, loss, 1e-6)
    assert_close(padded_grad, grad, 1e-6)


def test_a_row_of_nothing_but_padding_does_not_move_the_loss() -> None:
    net = model()
    documents = tokens(2, 11)
    mask = torch.tensor([[0] * 11, [1] * 11])
    found = net(documents, attention_mask=mask, output_router_logits=True).aux_loss
    assert_close(found, net(documents[1:], output_router_logits=True).aux_loss, 1e-6)
    logits = (torch.randn(4, E, requires_grad=True),)
    nothing = load_balancing_loss(logits, choices(logits), torch.zeros(4))
    assert nothing.item() == 0 and nothing.requires_grad


def test_a_row_of_nothing_but_padding_does_not_move_the_gradient_of_the_loss() -> None:
    net, ids = model(), tokens(2, 11)
    grads = []
    for inputs, mask in ((ids, torch.tensor([[0] * 11, [1] * 11])), (ids[1:], None)):
        net.zero_grad()
        net(inputs, attention_mask=mask, output_router_logits=True).aux_loss.backward()
        grads.append(torch.stack([layer.block_sparse_moe.gate.weight.grad for layer in net.model.layers]))
    assert grads[1].abs().max() > 1e-5
    assert_close(*grads, 1e-6)


def test_a_model_whose_routers_are_zero_has_a_loss_of_the_experts_per_token() -> None:
    net = model()
    mask = torch.tensor([[0] * 5 + [1] * 6, [0] * 11])
    with torch.no_grad():
        for layer in net.model.layers:
            layer.block_sparse_moe.gate.weight.zero_()
        loss = net(tokens(2, 11), attention_mask=mask, output_router_logits=True).aux_loss
    assert loss.item() == pytest.approx(2.0, abs=1e-6)


def test_a_decode_step_takes_the_mask_of_the_whole_history() -> None:
    net = model()
    ids, mask = left_padded([tokens(1, 9)[0], tokens(1, 5, seed=3)[0]])
    cache = prefilled(net, ids, mask)
    grown = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
    step = tokens(2, 1, seed=4)
    out = net(step, attention_mask=grown, past_key_values=cache, output_router_logits=True, labels=step)
    assert_close(out.aux_loss, load_balancing_loss(out.router_logits, choices(out.router_logits)), 1e-6)


def test_the_loss_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="4 positions and the router logits 5"):
        load_balancing_loss((torch.zeros(5, E),), (torch.zeros(5, A, dtype=torch.long),), torch.ones(4))
    with pytest.raises(ValueError, match="at least one layer"):
        load_balancing_loss((), ())


def test_the_loss_is_added_with_its_coefficient() -> None:
    net, ids = model(router_aux_loss_coef=0.5), tokens(2, 11)
    with_router = net(ids, labels=ids, output_router_logits=True)
    without = net(ids, labels=ids)
    assert_close(with_router.loss, without.loss + 0.5 * with_router.aux_loss, 1e-6)
    assert without.aux_loss is None


# The shared expert and the residual


def test_the_shared_expert_is_mixed_by_a_sigmoid() -> None:
    torch.manual_seed(0)
    shared, coefficient = SharedExpert(config()), torch.randn(1, M)
    x, routed = rows(5), rows(5, seed=2)
    h = shared.down_proj(nn.functional.silu(shared.gate_proj(x)) * shared.up_proj(x))
    assert_close(shared(x), h)
    c = (x @ coefficient.T).sigmoid()
    assert_close(mix_shared(routed, h, x, coefficient), routed * (1 - c) + h * c, 1e-6)
    narrow = mix_shared(*(y.to(torch.bfloat16) for y in (routed, h, x, coefficient)))
    assert narrow.dtype == torch.bfloat16


def test_a_model_with_a_shared_expert_uses_it() -> None:
    net, ids = model(shared_intermediate_size=16), tokens(1, 9)
    before = net(ids).logits
    with torch.no_grad():
        net.model.layers[2].shared_mlp.down_proj.weight.zero_()
    assert (net(ids).logits - before).abs().max() > 1e-3


def test_without_postnorm_the_residual_is_the_input_itself() -> None:
    """With branches that give nothing the stack is alpha^(2L) times the embedding, then the last norm."""
    net, ids = model(postnorm=False), tokens(1, 9)
    factors = net.config.layernorm_linear_attention_alpha
    with torch.no_grad():
        for layer in net.model.layers:
            layer.block_sparse_moe.experts.down_proj.zero_()
            out = layer.self_attn.out_proj if layer.is_lightning else layer.self_attn.o_proj
            out.weight.zero_()
    hidden = net(ids, output_hidden_states=True).hidden_states
    assert_close(hidden[-2], hidden[0] * factors ** (2 * 3), 1e-5)
    with_norm = model(postnorm=True)
    assert (with_norm(ids).logits - model(postnorm=False)(ids).logits).abs().max() > 1e-2


def test_weights_start_random_in_every_expert() -> None:
    for name, parameter in Experts(config()).named_parameters():
        assert parameter.shape[0] == E, name
    net = model()
    for layer in net.model.layers:
        for parameter in layer.block_sparse_moe.parameters():
            assert parameter.abs().sum(-1).min() > 0
