"""Claims about where sequences lie: packed documents and padded rows are each as if alone."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tiny import LIGHTNING, V, assert_close, current_state_of, left_padded, model, prefilled, tokens
from torch import Tensor

from minimax_hybrid import HybridCache, MiniMaxM1ForCausalLM

ATTENTION = ["sdpa", "eager"]
NETS = {attention: model(attn_implementation=attention) for attention in ATTENTION}
NET = NETS["sdpa"]


def positions(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def logits(ids: Tensor, net: MiniMaxM1ForCausalLM = NET, **inputs: object) -> Tensor:
    with torch.no_grad():
        return net(ids, use_cache=inputs.pop("use_cache", False), **inputs).logits


def watched(
    net: MiniMaxM1ForCausalLM, ids: Tensor, lengths: list[int]
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Output of every attention module, the gradient of the embeddings from document 2 on, and the logits."""
    outputs: list[Tensor] = []
    hooks = [
        layer.self_attn.register_forward_hook(
            lambda module, args, out: outputs.append(out[0] if isinstance(out, tuple) else out)
        )
        for layer in net.model.layers
    ]
    embedded = net.model.embed_tokens(ids).detach().requires_grad_()
    out = net(inputs_embeds=embedded, position_ids=positions(lengths), use_cache=False).logits
    for hook in hooks:
        hook.remove()
    out[:, lengths[0] :].square().sum().backward()
    return [x.detach() for x in outputs], embedded.grad, out.detach()


# Packing


@pytest.mark.parametrize("attention", ATTENTION)
def test_a_document_reaches_no_other(attention: str) -> None:
    """Bit for bit in attention; in the experts another routing may change the order of sums."""
    net, lengths = model(attn_implementation=attention), [5, 1, 13]
    ids = tokens(1, 19)
    other = ids.clone()
    other[0, 4] = ids[0, 4] % (V - 1) + 1
    # every document's tokens go to one expert set, so that the experts add nothing of their own
    for layer in net.model.layers:
        layer.block_sparse_moe.gate.weight.data.zero_()
    (out, grad, logits_1), (out_2, grad_2, logits_2) = (watched(net, x, lengths) for x in (ids, other))
    assert not torch.equal(out[0][:, 4], out_2[0][:, 4])
    for i, (x, y) in enumerate(zip(out, out_2, strict=True)):
        assert torch.equal(x[:, 5:], y[:, 5:]), f"layer {i}"
    assert torch.equal(grad[:, 5:], grad_2[:, 5:])
    assert grad[:, 5:].abs().max() > 0
    assert_close(logits_2[:, 5:], logits_1[:, 5:])


def test_a_document_reaches_no_other_through_live_routers() -> None:
    """With routers that route, another token in document 1 changes which rows its experts see together."""
    lengths, ids = [5, 1, 13], tokens(1, 19)
    other = ids.clone()
    other[0, 4] = ids[0, 4] % (V - 1) + 1
    found, wanted = (logits(x, position_ids=positions(lengths)) for x in (other, ids))
    assert not torch.equal(found[:, 4], wanted[:, 4])
    assert_close(found[:, 5:], wanted[:, 5:])


def assert_each_alone(
    found: Tensor, ids: Tensor, lengths: list[int], net: MiniMaxM1ForCausalLM = NET
) -> None:
    """Logits (1, T, V) of packed documents are those of each document in a call of its own."""
    for document, part in zip(ids.split(lengths, 1), found.split(lengths, 1), strict=True):
        assert_close(part, logits(document, net))


@pytest.mark.parametrize("attention", ATTENTION)
@given(lengths=st.lists(st.integers(1, 80), min_size=1, max_size=5))
@example(lengths=[5, 1, 13, 64, 65])
def test_packed_documents_are_each_alone(attention: str, lengths: list[int]) -> None:
    net, ids = NETS[attention], tokens(1, sum(lengths))
    assert_each_alone(logits(ids, net, position_ids=positions(lengths)), ids, lengths, net)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_honours_documents_and_padding() -> None:
    net, lengths = model(attn_implementation="flex_attention", head_dim=16), [5, 1, 13]
    ids = tokens(1, 19)
    padded, mask = left_padded([tokens(1, 11)[0], tokens(1, 8, seed=3)[0]])
    real = mask.bool()
    with torch.compiler.set_stance("force_eager"):  # compiling it takes a minute
        packed_logits = logits(ids, net, position_ids=positions(lengths))
        padded_logits = logits(padded, net, attention_mask=mask)
    assert_close(packed_logits, logits(ids, position_ids=positions(lengths)))
    assert_close(padded_logits[real], logits(padded, attention_mask=mask)[real])


def test_several_rows_can_be_packed_each_in_its_own_way() -> None:
    rows = [[7, 12], [19], [1, 1, 17]]
    ids = tokens(3, 19)
    found = logits(ids, position_ids=torch.cat([positions(lengths) for lengths in rows]))
    for row, lengths in enumerate(rows):
        assert_each_alone(found[row : row + 1], ids[row : row + 1], lengths)


def test_one_row_of_positions_serves_every_row() -> None:
    ids = tokens(2, 19)
    found = logits(ids, position_ids=positions([7, 12]))
    assert_close(found[1:], logits(ids[1:], position_ids=positions([7, 12])))
    assert_close(found[:, 7:], logits(ids[:, 7:]))


def test_the_last_document_of_packed_rows_can_be_continued() -> None:
    rows = [[7, 12], [19], [1, 1, 17]]
    ids, more = tokens(3, 19), tokens(3, 50, seed=1)
    cache = HybridCache(NET.config)
    ids_positions = torch.cat([positions(lengths) for lengths in rows])
    logits(ids, position_ids=ids_positions, past_key_values=cache)
    found = [logits(more[:, t : t + 1], past_key_values=cache) for t in range(2)]
    found.append(logits(more[:, 2:], past_key_values=cache))
    for row, lengths in enumerate(rows):
        whole = torch.cat([ids[row, 19 - lengths[-1] :], more[row]])[None]
        assert_close(torch.cat(found, 1)[row : row + 1], logits(whole)[:, lengths[-1] :])


def test_packed_rows_are_refused_where_boundaries_would_be_lost() -> None:
    ids = tokens(2, 19)
    cache = prefilled(NET, ids)
    with pytest.raises(ValueError, match="packed documents start with an empty cache"):
        NET(ids, position_ids=positions([7, 12]), past_key_values=cache)
    mask = torch.ones(2, 19, dtype=torch.long)
    mask[1, 17:] = 0
    with pytest.raises(ValueError, match="packed documents without a mask"):
        NET(ids, position_ids=positions([7, 12]), attention_mask=mask)


def test_log_probs_of_packed_documents_are_each_alone() -> None:
    lengths = [5, 1, 13]
    ids = tokens(1, 19)
    found = NET.log_probs(ids, position_ids=positions(lengths))
    alone = [NET.log_probs(document) for document in ids.split(lengths, 1)]
    assert_close(found, torch.cat(alone, dim=1))
    assert found[0, [0, 5, 6]].eq(0).all()


def test_the_loss_of_packed_documents_does_not_cross_their_borders() -> None:
    lengths = [5, 1, 13]
    ids = tokens(1, 19)
    loss = NET(ids, labels=ids, position_ids=positions(lengths), use_cache=False).loss
    scored = NET.log_probs(ids, position_ids=positions(lengths))
    assert_close(loss, -scored.sum() / (19 - 3))


# Padding


@pytest.fixture
def loud() -> MiniMaxM1ForCausalLM:
    """Tokens 0 and 1 have embeddings so large that any leak from padding shows."""
    net = model()
    with torch.no_grad():
        net.model.embed_tokens.weight[:2] *= 1000
    return net


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("rows", [[8], [8, 11], [8, 65, 1]], ids=str)
def test_left_padding_changes_nothing(loud: MiniMaxM1ForCausalLM, attention: str, rows: list[int]) -> None:
    loud.set_attn_implementation(attention)
    documents = [tokens(1, n, seed=n, low=2)[0] for n in rows]
    ids, mask = left_padded([torch.zeros(11, dtype=torch.long), *documents])
    ids, mask = ids[1:], mask[1:]
    real = mask.bool()
    found = logits(ids, loud, attention_mask=mask)
    cache = prefilled(loud, ids, mask)
    for row, document in enumerate(documents):
        assert_close(found[row, real[row]][None], logits(document[None], loud))
        fresh = prefilled(loud, document[None])
        for i in LIGHTNING:
            assert_close(current_state_of(cache, i)[row : row + 1], current_state_of(fresh, i))
    pads = ids.masked_fill(~real, 1)
    assert_close(logits(pads, loud, attention_mask=mask)[real], found[real])
    counted = (mask.cumsum(-1) - 1).clamp(min=0)
    assert torch.equal(logits(ids, loud, attention_mask=mask, position_ids=counted), found)


def test_left_padded_prompts_continue_greedily_as_each_alone(loud: MiniMaxM1ForCausalLM) -> None:
    documents = [tokens(1, n, seed=n, low=2)[0] for n in (8, 11, 62)]
    ids, mask = left_padded(documents)
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    found = loud.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    for row, document in enumerate(documents):
        alone = loud.generate(document[None], **options)[0, len(document) :]
        assert torch.equal(found[row], alone)


def test_right_padding_then_decoding_is_each_row_alone(loud: MiniMaxM1ForCausalLM) -> None:
    lengths, more = [8, 70, 64], tokens(3, 5, seed=1)
    ids = tokens(3, 70, low=2)
    mask = (torch.arange(70) < torch.tensor(lengths)[:, None]).long()
    cache = prefilled(loud, ids.masked_fill(mask == 0, 0), mask)
    found = [logits(more[:, :3], loud, past_key_values=cache)]
    found += [logits(more[:, t : t + 1], loud, past_key_values=cache) for t in (3, 4)]
    for row, n in enumerate(lengths):
        whole = torch.cat([ids[row, :n], more[row]])[None]
        assert_close(torch.cat(found, 1)[row : row + 1], logits(whole, loud)[:, n:])


@pytest.mark.parametrize("attention", ATTENTION)
def test_a_row_of_nothing_but_padding_is_finite_and_harmless(attention: str) -> None:
    net = model(attn_implementation=attention)
    ids = tokens(2, 9)
    mask = torch.tensor([[0] * 9, [1] * 9])
    out = net(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), output_router_logits=True)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in net.named_parameters()}
    assert out.logits.isfinite().all()
    net.zero_grad()
    alone = net(ids[1:], labels=ids[1:], output_router_logits=True)
    alone.loss.backward()
    assert_close(out.loss.detach(), alone.loss.detach())
    for name, p in net.named_parameters():
        assert_close(grads[name], p.grad)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ATTENTION)
def test_padding_with_a_zero_embedding_has_no_gradient_of_its_own(side: str, attention: str) -> None:
    """Eight post-norm layers, a pad embedding of zeros: gradients are those of the unpadded run."""
    net = model(num_hidden_layers=8, attn_type_list=[0] * 7 + [1], attn_implementation=attention)
    with torch.no_grad():
        net.model.embed_tokens.weight[0] = 0
    document = tokens(1, 9)
    pads = torch.zeros(1, 4, dtype=torch.long)
    order = (pads, document) if side == "left" else (document, pads)
    ids = torch.cat(order, dim=1)
    mask = torch.cat([torch.full_like(x, int(x is document)) for x in order], dim=1)
    grads = []
    for inputs, labels, m in ((document, document, None), (ids, ids.masked_fill(mask == 0, -100), mask)):
        net.zero_grad()
        net(inputs, attention_mask=m, labels=labels, output_router_logits=True).loss.backward()
        grads.append({name: p.grad.clone() for name, p in net.named_parameters()})
    for name, grad in grads[0].items():
        assert grads[1][name].isfinite().all(), name
        assert_close(grads[1][name], grad)


def test_padding_in_the_middle_is_skipped() -> None:
    ids = tokens(1, 20)
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[0, 7:12] = 0
    found = logits(ids, attention_mask=mask)
    real = mask[0].bool()
    assert_close(found[:, real], logits(ids[:, real]))
