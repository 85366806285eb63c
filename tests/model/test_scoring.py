"""What a token is scored from: the one before it in its own sequence, wherever padding and documents lie."""

import pytest
import torch

from minimax_hybrid import MiniMaxM1Config, MiniMaxM1ForCausalLM


@pytest.fixture(scope="module")
def model() -> MiniMaxM1ForCausalLM:
    torch.manual_seed(0)
    config = MiniMaxM1Config.tiny(output_router_logits=True, router_aux_loss_coef=0.5, num_hidden_layers=2)
    return MiniMaxM1ForCausalLM(config).eval()


def tokens(rows: int, T: int = 20) -> torch.Tensor:
    return torch.randint(0, 128, (rows, T), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("hidden", [range(0, 5), range(7, 12), range(15, 20), [0, 7, 8, 13]])
def test_padding_anywhere_changes_no_score_and_no_loss(model, hidden):
    ids, mask = tokens(1), torch.ones(1, 20, dtype=torch.long)
    mask[:, list(hidden)] = 0
    kept = mask[0].bool()
    scores = model.log_probs(ids, attention_mask=mask)
    torch.testing.assert_close(scores[:, kept], model.log_probs(ids[:, kept]), atol=1e-5, rtol=1e-5)
    assert not scores[:, ~kept].any()
    padded = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    alone = model(ids[:, kept], labels=ids[:, kept]).loss
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-5)


def test_scores_are_those_of_the_logits_one_position_before(model):
    ids = tokens(2)
    logits = model(ids).logits[:, :-1].log_softmax(-1)
    scores = model.log_probs(ids.int())
    torch.testing.assert_close(scores[:, 1:], logits.gather(-1, ids[:, 1:, None])[..., 0], atol=1e-5, rtol=0)
    assert not scores[:, 0].any()


def test_scores_see_a_hook_on_the_head_as_the_logits_do(model):
    ids = tokens(1)
    handle = model.lm_head.register_forward_hook(lambda module, args, out: out * 2)
    try:
        logits = model(ids).logits[:, :-1].log_softmax(-1)
        scores = model.log_probs(ids)[:, 1:]
    finally:
        handle.remove()
    torch.testing.assert_close(scores, logits.gather(-1, ids[:, 1:, None])[..., 0], atol=1e-5, rtol=0)


def test_micro_batches_with_a_router_loss_add_up(model):
    """The load-balancing loss of each part counts by its tokens; the small rest is that it is not linear."""
    ids = tokens(4)
    whole = model(ids, labels=ids, num_items_in_batch=76)
    parts = [model(row[None], labels=row[None], num_items_in_batch=76) for row in ids]
    plain = whole.loss - 0.5 * whole.aux_loss
    mean_aux = sum(part.aux_loss for part in parts) / 4
    torch.testing.assert_close(sum(part.loss for part in parts), plain + 0.5 * mean_aux, atol=1e-5, rtol=0)


def test_labels_that_teach_nothing_give_a_loss_of_zero_with_a_graph(model):
    ids = tokens(1)
    loss = model(ids, labels=torch.full_like(ids, -100)).loss
    assert loss.item() == 0 and loss.requires_grad


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (dict(cu_seq_lens_q=torch.tensor([0, 3, 20])), "give position_ids that restart"),
        (dict(attention_mask=torch.full((1, 20), 2)), "attention_mask holds 2"),
        (dict(attention_mask=torch.full((1, 20), -3.0)), "attention_mask holds -3.0"),
        (dict(logits_to_keep=-3), "logits_to_keep is -3"),
        (
            dict(
                attention_mask=torch.tensor([[1] * 4 + [0] * 2 + [1] * 14]),
                position_ids=torch.tensor([[0, 1, 2, 3, 0, 0, *range(14)]]),
            ),
            "position_ids restart between two tokens",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(model, call, words):
    with pytest.raises(ValueError, match=words):
        model(tokens(1), **call)


def test_generation_from_no_token_is_refused(model):
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1] = 0
    with pytest.raises(ValueError, match=r"sequences \[1\] end in padding or are nothing else.*on the left"):
        model.generate(tokens(2), attention_mask=mask, max_new_tokens=2)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("head_dtype", ["float32", "bfloat16"])
def test_a_temperature_must_be_above_zero_for_every_head(temperature, head_dtype):
    model = MiniMaxM1ForCausalLM(MiniMaxM1Config.tiny(num_hidden_layers=1, head_dtype=head_dtype))
    with pytest.raises(ValueError, match="temperature"):
        model.log_probs(tokens(1), temperature=temperature)


def test_a_factor_left_out_beside_others_is_warned_of():
    with pytest.warns(UserWarning, match="layernorm_mlp_alpha not given"):
        MiniMaxM1Config(
            num_hidden_layers=2, layernorm_full_attention_alpha=2.0, layernorm_linear_attention_alpha=2.0
        )


@pytest.mark.parametrize("router", [False, True])
def test_a_micro_batch_without_labels_changes_nothing(model: MiniMaxM1ForCausalLM, router: bool) -> None:
    """Its loss is 0 and its gradients are 0, also where a trainer gives the number of labels in the batch."""
    ids = torch.arange(1, 10)[None]
    none = ids.new_full(ids.shape, -100)
    loss = model(ids, labels=none, num_items_in_batch=16, output_router_logits=router).loss
    model.zero_grad()
    loss.backward()
    assert loss.item() == 0
    assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
