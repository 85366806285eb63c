"""The same weights in transformers' own `MiniMax`, where that class is right: the whole head rotates, heads
are a power of two, layer 0 is softmax, the residual is normed, and nothing is padded.

Its decay of layer i has 1 - i / (L - 1 + 1e-5) + 1e-5 where the released code divides by L - 1. In the last
of four layers that is a third more decay, seen after a few hundred tokens. So its tables are set to the
release's here, and one test leaves them as they are.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MiniMaxConfig, MiniMaxForCausalLM

from minimax_hybrid import MiniMaxM1Config, MiniMaxM1ForCausalLM
from minimax_hybrid.config import LIGHTNING, to_transformers
from minimax_hybrid.lightning_attention import layer_log_decay

CONFIGS = {
    "alternating": dict(attn_type_list=[1, 0, 1, 0], num_attention_heads=4, num_key_value_heads=2),
    "mostly lightning": dict(attn_type_list=[1, 0, 0, 0], num_attention_heads=8, num_key_value_heads=1),
    "factors": dict(
        attn_type_list=[1, 0, 0, 1],
        num_attention_heads=2,
        num_key_value_heads=2,
        layernorm_full_attention_alpha=1.7,
        layernorm_full_attention_beta=0.9,
        layernorm_linear_attention_alpha=1.2,
        layernorm_linear_attention_beta=0.8,
        layernorm_mlp_alpha=1.1,
        layernorm_mlp_beta=1.3,
        num_local_experts=5,
        num_experts_per_tok=3,
        rms_norm_eps=1e-4,
        rope_theta=1e4,
        tie_word_embeddings=True,
    ),
}
Pair = tuple[nn.Module, nn.Module]


def pair_of(*, own_decay: bool = False, **changes: Any) -> Pair:
    """Our model and transformers', with the same random weights; both with our decay unless `own_decay`."""
    sizes = dict(num_hidden_layers=4, head_dim=16, rotary_dim=16, hidden_size=48, vocab_size=71)
    config = MiniMaxM1Config.tiny(**(sizes | changes))
    torch.manual_seed(0)
    ours = MiniMaxM1ForCausalLM(config)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.1)
    theirs = MiniMaxForCausalLM(MiniMaxConfig.from_dict(to_transformers(config)))
    state = {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in ours.state_dict().items()}
    wrong = theirs.load_state_dict(state, strict=False)
    assert not wrong.unexpected_keys
    assert all("decay" in name or "slope" in name for name in wrong.missing_keys)
    for i, layer in enumerate(theirs.model.layers):
        if config.attn_type_list[i] == LIGHTNING and not own_decay:
            slopes = -layer_log_decay(config.num_attention_heads, i, 4, device=torch.device("cpu"))
            attention = layer.self_attn
            attention.slope_rate = slopes[:, None, None]
            tables = attention.decay_factors(attention.slope_rate)
            attention.query_decay, attention.key_decay, attention.diagonal_decay = tables
    return ours.eval(), theirs.eval()


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return pair_of(**CONFIGS[request.param])


def tokens(B: int, T: int) -> Tensor:
    return torch.randint(0, 71, (B, T), generator=torch.Generator().manual_seed(T))


@pytest.mark.parametrize("T", [1, 5, 64, 255, 256, 257, 300])
@torch.no_grad()
def test_logits_hidden_states_and_router_logits_are_the_same(pair: Pair, T: int) -> None:
    ours, theirs = (
        model(tokens(2, T), output_hidden_states=True, output_router_logits=True) for model in pair
    )
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=3e-5)
    for mine, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=5e-5)
    for mine, other in zip(ours.router_logits, theirs.router_logits, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-5)
    torch.testing.assert_close(ours.aux_loss, theirs.aux_loss, rtol=0, atol=3e-6)


def test_the_loss_and_its_gradients_are_the_same(pair: Pair) -> None:
    ids = tokens(2, 90)
    labels = ids.masked_fill(torch.arange(90) < 11, -100)
    losses, gradients = [], []
    for model in pair:
        model.zero_grad()
        loss = model(ids, labels=labels, output_router_logits=True).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append(
            {name.replace("block_sparse_moe", "mlp"): x.grad for name, x in model.named_parameters()}
        )
    torch.testing.assert_close(*losses, rtol=0, atol=3e-6)
    ours, theirs = gradients
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(
            gradient, theirs[name], rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("T", [1, 30, 250])
def test_greedy_generation_is_the_same(pair: Pair, T: int) -> None:
    options = dict(max_new_tokens=16, do_sample=False, return_dict_in_generate=True, output_logits=True)
    ours, theirs = (model.generate(tokens(1, T), **options) for model in pair)
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), rtol=0, atol=3e-5)


@torch.no_grad()
def test_with_its_own_decay_the_difference_grows_with_the_length_and_stays_small() -> None:
    ours, theirs = pair_of(own_decay=True, **CONFIGS["mostly lightning"])
    errors = [float((ours(tokens(1, T)).logits - theirs(tokens(1, T)).logits).abs().max()) for T in (8, 300)]
    assert errors[0] < 1e-5 < errors[1] < 5e-4


def test_a_change_of_one_factor_would_be_seen() -> None:
    ours, _ = pair_of(**CONFIGS["factors"])
    _, theirs = pair_of(**(CONFIGS["factors"] | {"layernorm_mlp_beta": 1.301}))
    with torch.no_grad():
        assert (ours(tokens(1, 20)).logits - theirs(tokens(1, 20)).logits).abs().max() > 1e-4
