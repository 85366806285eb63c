"""Claims about the two attention layers: the published equations, constants, types and gradients."""

import math

import pytest
import torch
from tiny import KINDS, LIGHTNING, assert_close, config, difference, left_padded, model, tokens
from torch import Tensor, nn

from minimax_hybrid.layers import RMSNorm, RotaryEmbedding, apply_rotary_emb, weighted_residual
from minimax_hybrid.lightning_attention import LightningAttention, layer_log_decay
from minimax_hybrid.sequences import SequenceMetadata
from minimax_hybrid.softmax_attention import SoftmaxAttention
from minimax_kernels import lightning_attention

CPU = torch.device("cpu")


def lightning(layer_idx: int = 1, **changes: object) -> LightningAttention:
    torch.manual_seed(layer_idx)
    module = LightningAttention(config(**{"num_attention_heads": 4, "head_dim": 8, **changes}), layer_idx)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def plain(T: int, B: int = 1) -> SequenceMetadata:
    return SequenceMetadata(torch.arange(T).expand(B, T))


def hidden(B: int, T: int, seed: int = 0) -> Tensor:
    return torch.randn(B, T, 32, generator=torch.Generator().manual_seed(seed))


def published_lightning(module: LightningAttention, x: Tensor) -> Tensor:
    """The release's layer in the order in which its file has it, one token at a time, in float64."""
    H, D = module.num_heads, module.head_dim
    slopes = [2 ** (-8 * (h + 1) / H) for h in range(H)]
    decay = torch.tensor(slopes).double() * (1 - module.layer_idx / (module.num_layers - 1) + 1e-5)
    weights = {name: p.double() for name, p in module.named_parameters()}
    outs = []
    for row in x.double():
        state, out_rows = torch.zeros(H, D, D, dtype=torch.float64), []
        for token in row:
            qkv = nn.functional.silu(weights["qkv_proj.weight"] @ token).view(H, 3 * D)
            q, k, v = qkv[:, :D], qkv[:, D : 2 * D], qkv[:, 2 * D :]
            state = (-decay).exp()[:, None, None] * state + k[:, :, None] * v[:, None, :]
            out = torch.einsum("hd,hde->he", q, state).flatten()
            out = out * (out.square().mean() + 1e-6).rsqrt() * weights["norm.weight"]
            gate = (weights["output_gate.weight"] @ token).sigmoid()
            out_rows.append(weights["out_proj.weight"] @ (gate * out))
        outs.append(torch.stack(out_rows))
    return torch.stack(outs)


@pytest.mark.parametrize("layer_idx", [0, 2, 3])
def test_the_lightning_layer_is_the_published_one(layer_idx: int) -> None:
    module, x = lightning(layer_idx), hidden(2, 70)
    assert_close(module(x, plain(70, 2), None).double(), published_lightning(module, x))


def test_the_gradients_of_the_lightning_layer_are_those_of_its_equations() -> None:
    module, x = lightning(), hidden(1, 66).requires_grad_()
    parameters = dict(module.named_parameters())
    weight = hidden(1, 66, seed=3)
    inputs = [x, *parameters.values()]
    found = torch.autograd.grad((module(x, plain(66), None) * weight).sum(), inputs)
    wanted = torch.autograd.grad((published_lightning(module, x) * weight).sum(), inputs)
    for name, a, b in zip(["x", *parameters], found, wanted, strict=True):
        assert difference(a / b.abs().max(), b / b.abs().max()) <= 1e-5, name


def test_decay_is_the_published_one() -> None:
    first = [-layer_log_decay(H, 0, 10**9, device=CPU) / (1 + 1e-5) for H in (4, 64)]
    assert first[0].tolist() == pytest.approx([0.25, 0.0625, 0.015625, 0.00390625])
    assert first[1][[0, -1]].tolist() == pytest.approx([0.917004, 0.00390625], rel=1e-6)
    factors = [(-layer_log_decay(4, i, 80, device=CPU)[0] / 0.25).item() for i in (0, 1, 78, 79)]
    assert factors == pytest.approx([1.00001, 0.987352, 0.0126682, 1e-5], rel=1e-4)
    assert layer_log_decay(4, 0, 1, device=CPU).isfinite().all()


@pytest.mark.parametrize("H", [1, 2, 3, 5, 6, 12, 20])
def test_decay_of_heads_that_are_no_power_of_two_interleaves(H: int) -> None:
    """Those of the power of two below, then every second one of twice as many."""
    found = (-layer_log_decay(H, 0, 10**9, device=CPU) / (1 + 1e-5)).tolist()
    below = 2 ** int(math.log2(H))
    wanted = [2 ** (-8 * (h + 1) / below) for h in range(below)]
    wanted += [2 ** (-8 * (h + 1) / (2 * below)) for h in range(0, 2 * below, 2)][: H - below]
    assert found == pytest.approx(wanted, rel=1e-6)


def published_softmax(module: SoftmaxAttention, x: Tensor, rotary_dim: int, theta: float) -> Tensor:
    """Grouped-query causal attention with rotary pairs (i, i + rotary_dim / 2), in float64."""
    D, T = module.head_dim, x.shape[1]
    q, k, v = (
        (x.double() @ p.weight.double().T).view(T, -1, D).transpose(0, 1)
        for p in (module.q_proj, module.k_proj, module.v_proj)
    )
    angle = torch.outer(
        torch.arange(T).double(), theta ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    )
    half = rotary_dim // 2

    def turn(y: Tensor) -> Tensor:
        a, b, rest = y[..., :half], y[..., half:rotary_dim], y[..., rotary_dim:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1)

    q, k = turn(q), turn(k)
    k, v = (y.repeat_interleave(len(q) // len(y), dim=0) for y in (k, v))
    scores = (q @ k.mT / D**0.5).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(T, -1)
    return (out @ module.o_proj.weight.double().T)[None]


@pytest.mark.parametrize("rotary_dim", [0, 4, 16])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_softmax_layer_is_the_published_one(rotary_dim: int, attention: str) -> None:
    """Four query heads on two key heads; only the leading rotary_dim channels of a head turn."""
    settings = config(
        num_attention_heads=4, num_key_value_heads=2, rotary_dim=rotary_dim, attn_implementation=attention
    )
    torch.manual_seed(0)
    module, x = SoftmaxAttention(settings, 1), hidden(1, 40)
    cos_sin = RotaryEmbedding(rotary_dim, 1e4)(torch.arange(40)[None])
    mask = torch.full((40, 40), -torch.inf).triu(1)[None, None] if attention == "eager" else None
    out, weights = module(x, plain(40), None, rotary=cos_sin, attention_mask=mask)
    assert_close(out.double(), published_softmax(module, x, rotary_dim, 1e4))
    assert (weights is not None) == (attention == "eager")


def test_rotation_is_float32_whatever_the_type() -> None:
    x = torch.randn(1, 2, 9, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = RotaryEmbedding(8, 1e7)(torch.arange(9)[None] + 100_000)
    narrow = apply_rotary_emb(x.to(torch.bfloat16), cos, sin)
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow, apply_rotary_emb(x.to(torch.bfloat16).float(), cos, sin).to(torch.bfloat16))
    assert torch.equal(narrow[..., 8:], x[..., 8:].to(torch.bfloat16))


def test_the_norm_is_float32_then_cast_then_weighted() -> None:
    norm = RMSNorm(32, eps=1e-5)
    nn.init.normal_(norm.weight)
    x = hidden(2, 3) * 100
    wanted = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight
    assert_close(norm(x), wanted, 1e-6)
    norm.to(torch.bfloat16)
    narrow = x.to(torch.bfloat16)
    inner = narrow.float() * (narrow.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert torch.equal(norm(narrow), inner.to(torch.bfloat16) * norm.weight)


def test_the_residual_is_weighted() -> None:
    a, b = hidden(1, 2), hidden(1, 2, seed=1)
    assert torch.equal(weighted_residual(a, b, alpha=2.0, beta=0.5), a * 2 + b * 0.5)


def test_dropout_on_attention_is_for_training_only() -> None:
    net, ids = model(attention_dropout=0.5), tokens(2, 20)
    assert torch.equal(net(ids).logits, net(ids).logits)
    assert torch.equal(net(ids).logits, model()(ids).logits)
    net.train()
    assert not torch.equal(net(ids).logits, net(ids).logits)


def test_attention_weights_are_those_of_the_softmax_layers() -> None:
    net = model(attn_implementation="eager")
    ids, mask = left_padded([tokens(1, 9)[0], tokens(1, 5)[0]])
    found = net(ids, attention_mask=mask, output_attentions=True).attentions
    assert [x is None for x in found] == [True, False, True, True]
    assert found[1].shape == (2, 3, 9, 9)
    assert_close(found[1].sum(-1), torch.ones(2, 3, 9))
    assert found[1][1, :, 4:, :4].max() == 0
    assert net(ids).attentions is None


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_every_attention_gives_the_same_logits(implementation: str) -> None:
    ids, mask = left_padded([tokens(1, 70)[0], tokens(1, 33)[0]])
    real = mask.bool()
    net = model(attn_implementation=implementation)
    found, cache_found = net(ids, attention_mask=mask), net(ids[:, :1], attention_mask=mask[:, :1])
    wanted = model(attn_implementation="eager")(ids, attention_mask=mask)
    assert_close(found.logits[real], wanted.logits[real])
    rest = net(ids[:, 1:], attention_mask=mask, past_key_values=cache_found.cache)
    assert_close(rest.logits[real[:, 1:]], wanted.logits[:, 1:][real[:, 1:]])


@torch.no_grad()
def test_the_attention_matrix_of_a_lightning_layer_is_what_it_computes() -> None:
    net = model()
    layer = net.model.layers[LIGHTNING[0]].self_attn
    x = torch.randn(2, 70, net.config.hidden_size, generator=torch.Generator().manual_seed(0))
    q, k, v = layer.project(x)
    weights = layer.attention_matrix(x)
    out, _ = lightning_attention(q, k, v, layer.log_decay(x.device))
    assert_close((weights @ v.transpose(1, 2)).transpose(1, 2), out)
    assert not weights.triu(1).any()


@torch.no_grad()
def test_attentions_have_one_entry_a_layer_and_none_where_attention_is_linear() -> None:
    net = model()
    net.set_attn_implementation("eager")
    attentions = net(tokens(2, 9), output_attentions=True).attentions
    shapes = [None if x is None else tuple(x.shape) for x in attentions]
    heads = net.config.num_attention_heads
    assert shapes == [(2, heads, 9, 9) if kind else None for kind in KINDS]
