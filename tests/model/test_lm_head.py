"""Claims about the head: float32 whatever happens to its weight; log-probabilities without full logits."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import V, assert_close, left_padded, model, tokens
from torch import Tensor

from minimax_hybrid.lm_head import LMHead, Scoring, head_log_probs

TINY = 2.0**-9  # lost when 1 + TINY is rounded to bfloat16


def head_of_two(**options: str) -> LMHead:
    head = LMHead(2, 2, **{"head_dtype": "float32", **options})
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    return head


def with_adapter(head: LMHead) -> torch.nn.Module:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head = head

        def forward(self, x: Tensor) -> Tensor:
            return self.lm_head(x)

    return get_peft_model(Holder(), LoraConfig(target_modules=["lm_head"], r=1))


@pytest.mark.parametrize("way", ["plain", "autocast", "moved", "recast", "adapter"])
def test_logits_are_float32_arithmetic(way: str) -> None:
    head = head_of_two()
    hidden = torch.tensor([[1.0, TINY]], dtype=torch.bfloat16, requires_grad=True)
    if way == "moved":
        head.to(torch.bfloat16)
    elif way == "recast":
        head.register_forward_pre_hook(lambda module, args: module.to(torch.bfloat16) and None)
    elif way == "adapter":
        head = with_adapter(head.to(torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        logits = head(hidden)
    assert logits.dtype == torch.float32
    assert logits.tolist() == [[1.001953125, 1.0]]
    logits.sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_those_of_the_cast_operands(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    head = LMHead(48, 3000, head_dtype="float32").to(dtype)
    hidden = torch.randn(3, 5, 48).to(dtype)
    assert_close(head(hidden), torch.nn.functional.linear(hidden.float(), head.weight.float()), 1e-6)


def test_another_type_can_be_asked_for() -> None:
    hidden = torch.tensor([[1.0, TINY]], dtype=torch.bfloat16)
    rounded = head_of_two(head_dtype="bfloat16")(hidden)
    assert rounded.dtype == torch.bfloat16 and rounded.tolist() == [[1.0, 1.0]]
    assert head_of_two(head_dtype="float64")(hidden).dtype == torch.float64
    assert head_of_two()(hidden.double()).dtype == torch.float64


def test_a_tied_head_keeps_one_weight_in_its_own_type() -> None:
    net = model(tie_word_embeddings=True).to(torch.bfloat16)
    assert net.lm_head.weight is net.model.embed_tokens.weight
    assert net.lm_head.weight.dtype == torch.bfloat16
    assert net(tokens(1, 5)).logits.dtype == torch.float32


# Log-probabilities


def definition(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Of token t and of its distribution, (B, T), 0 at t = 0."""
    every = (logits[:, :-1] / temperature).log_softmax(-1)
    log_probs = every.gather(-1, ids[:, 1:, None])[..., 0]
    entropy = -(every.exp() * every).sum(-1)
    return tuple(torch.nn.functional.pad(x, (1, 0)) for x in (log_probs, entropy))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_log_probs_are_log_softmax_and_gather(temperature: float) -> None:
    net, ids = model(), tokens(3, 40)
    found = net.log_probs(ids, temperature=temperature, entropy=True)
    wanted = definition(net(ids).logits, ids, temperature)
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b, 2e-6)
    assert torch.equal(net.log_probs(ids, temperature=temperature), found[0])


def test_the_temperature_divides_the_logits() -> None:
    """Logits 2, 1, 0 at temperature 0.5: the first token has log-probability -0.142932."""
    head = LMHead(1, 3, head_dtype="float32")
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[2.0], [1.0], [0.0]]))
    (one,) = head_log_probs(head, torch.ones(1, 1), torch.tensor([0]), Scoring(temperature=0.5))
    assert one.item() == pytest.approx(-0.142932, abs=1e-6)


def test_log_probs_have_the_gradient_of_the_definition() -> None:
    net, ids = model(), tokens(2, 30)
    weight = torch.randn(2, 2, 30, generator=torch.Generator().manual_seed(1))
    grads = []
    for results in (
        lambda: net.log_probs(ids, entropy=True, temperature=0.7),
        lambda: definition(net(ids).logits, ids, 0.7),
    ):
        net.zero_grad()
        sum((x * w).sum() for x, w in zip(results(), weight, strict=True)).backward()
        grads.append({name: p.grad.clone() for name, p in net.named_parameters()})
    for name, grad in grads[0].items():
        assert_close(grad, grads[1][name])


def test_padding_has_no_log_prob_and_changes_none() -> None:
    net = model()
    rows = [tokens(1, n, seed=n)[0] for n in (12, 7, 1)]
    left, left_mask = left_padded(rows)
    right, right_mask = left.flip(1), left_mask.flip(1)
    for ids, mask, side in ((left, left_mask, "left"), (right, right_mask, "right")):
        if side == "right":
            ids = torch.stack([torch.cat([row, row.new_zeros(12 - len(row))]) for row in rows])
        found, entropy = net.log_probs(ids, attention_mask=mask, entropy=True)
        assert found[mask == 0].eq(0).all() and entropy[mask == 0].eq(0).all()
        for b, row in enumerate(rows):
            alone, alone_entropy = net.log_probs(row[None], entropy=True)
            assert_close(found[b, mask[b].bool()], alone[0])
            assert_close(entropy[b, mask[b].bool()], alone_entropy[0])


def test_log_probs_see_an_adapter_on_the_head() -> None:
    net, ids = model(), tokens(2, 20)
    adapted = get_peft_model(net, LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False))
    found = adapted.base_model.model.log_probs(ids, entropy=True)
    wanted = definition(adapted(ids).logits, ids)
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b, 2e-6)
    with adapted.disable_adapter():
        assert (adapted.base_model.model.log_probs(ids) - found[0]).abs().max() > 1e-3
    found[0].sum().backward()
    grads = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
    assert grads and all(grad is not None and grad.abs().sum() > 0 for grad in grads.values())


def test_log_probs_follow_the_heads_type() -> None:
    net, ids = model(head_dtype="bfloat16"), tokens(2, 20)
    wanted = definition(net(ids).logits.float(), ids)[0]
    assert_close(net.log_probs(ids), wanted, 2e-6)


# Which logits


def test_only_the_last_logits_are_computed_where_they_are_asked_for() -> None:
    net, ids = model(), tokens(2, 20)
    full = net(ids).logits
    assert torch.equal(net(ids, logits_to_keep=3).logits, full[:, -3:])
    some = torch.tensor([0, 7, 19])
    assert_close(net(ids, logits_to_keep=some).logits, full[:, some])


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True}], ids=str)
def test_prefill_in_generation_computes_one_row_of_logits(options: dict) -> None:
    net, widths = model(), []
    net.lm_head.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    net.generate(tokens(2, 30), max_new_tokens=3, pad_token_id=0, **options)
    assert set(widths) == {1}


def test_logits_have_the_shape_of_the_vocabulary() -> None:
    assert model()(tokens(2, 3)).logits.shape == (2, 3, V)
