"""Claims about the whole model: training options change no number, adapters fit, bad input is named."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import KINDS, V, assert_close, difference, model, tokens
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from minimax_hybrid import HybridCache, MiniMaxM1ForCausalLM
from minimax_hybrid.layers import RMSNorm

PROJECTIONS = ["qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "output_gate"]


def logits(net: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return net(ids).logits


def gradients(net: torch.nn.Module, ids: Tensor, **inputs: object) -> tuple[Tensor, dict[str, Tensor]]:
    net.zero_grad()
    loss = net(ids, labels=ids, output_router_logits=True, **inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in net.named_parameters() if p.requires_grad}


def assert_same_gradients(
    found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-5
) -> None:
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        off = difference(found[name], grad)
        assert off <= tolerance, f"{name} is off by {off:.3g}"


# Training


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("use_cache", [True, False])
def test_gradient_checkpointing_changes_nothing(reentrant: bool, use_cache: bool) -> None:
    net, ids = model().train(), tokens(2, 70)
    loss, grads = gradients(net, ids, use_cache=False)
    net.gradient_checkpointing_enable({"use_reentrant": reentrant})
    checkpointed_loss, checkpointed = gradients(net, ids, use_cache=use_cache)
    assert torch.equal(loss, checkpointed_loss)
    assert_same_gradients(checkpointed, grads, 0.0)


def test_checkpointing_refuses_to_continue_a_cache() -> None:
    net, ids = model().train(), tokens(1, 9)
    cache = HybridCache(net.config)
    net(ids, past_key_values=cache)
    net.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="cannot be continued under gradient checkpointing"):
        net(ids, past_key_values=cache)


def test_a_cache_while_training_changes_no_gradient() -> None:
    net, ids = model().train(), tokens(2, 70)
    loss, grads = gradients(net, ids, use_cache=False)
    cached_loss, cached = gradients(net, ids, use_cache=True)
    assert_close(cached_loss, loss)
    assert_same_gradients(cached, grads)


def test_the_loss_is_the_mean_or_the_sum_over_what_the_trainer_counts() -> None:
    net, ids = model(), tokens(2, 20)
    labels = ids.masked_fill(torch.arange(20) < 8, -100)
    log_probs = net.log_probs(ids)[:, 8:]
    assert_close(net(ids, labels=labels).loss, -log_probs.mean())
    assert_close(net(ids, labels=labels, num_items_in_batch=100).loss, -log_probs.sum() / 100)


def test_num_items_in_batch_makes_micro_batches_add_up() -> None:
    """Gradients of one batch are the sum of those of its rows, however many tokens each row counts."""
    net, ids = model(), tokens(4, 20)
    labels = ids.masked_fill(torch.arange(20) < torch.tensor([[3], [9], [15], [19]]), -100)
    N = int((labels[:, 1:] != -100).sum())

    def grads(rows: list[slice]) -> dict[str, Tensor]:
        net.zero_grad()
        for row in rows:
            net(ids[row], labels=labels[row], num_items_in_batch=N).loss.backward()
        return {name: p.grad.clone() for name, p in net.named_parameters()}

    whole = grads([slice(0, 4)])
    assert_same_gradients(grads([slice(b, b + 1) for b in range(4)]), whole)
    assert_same_gradients(grads([slice(0, 2), slice(2, 4)]), whole)


@pytest.mark.parametrize("way", ["bf16", "autocast"])
def test_narrow_training_stays_near_float32(way: str) -> None:
    net, ids = model(), tokens(2, 70)
    loss, grads = gradients(net, ids)
    net = net.to(torch.bfloat16) if way == "bf16" else net
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        out = net(ids, labels=ids, output_router_logits=True)
        assert out.logits.dtype == torch.float32
    net.zero_grad()
    out.loss.backward()
    assert difference(out.loss.detach(), loss) < 0.05
    for name, p in net.named_parameters():
        cosine = torch.cosine_similarity(p.grad.float().flatten(), grads[name].flatten(), dim=0)
        assert cosine > 0.85, f"{name}: {cosine}"


def test_a_bfloat16_model_keeps_its_memory_in_float32() -> None:
    net = model().to(torch.bfloat16)
    cache = HybridCache(net.config)
    net(tokens(1, 70), past_key_values=cache)
    assert cache.layers[0].stored.state.dtype == torch.float32
    assert cache.layers[0].stored.k_cache.dtype == torch.bfloat16


# Weights


def test_no_embedding_starts_at_zero() -> None:
    """Not even the padding token's: a zero vector makes gradients overflow."""
    net = model(pad_token_id=0)
    assert net.model.embed_tokens.weight.norm(dim=1).min() > 0.1
    for name, p in net.named_parameters():
        assert p.abs().sum(-1).min() > 0, name
    assert all(m.weight.eq(1).all() for m in net.modules() if isinstance(m, RMSNorm))


@pytest.mark.parametrize("mean_resizing", [True, False])
@pytest.mark.parametrize("tied", [False, True])
def test_added_tokens_do_not_start_at_zero_and_change_no_other(tied: bool, mean_resizing: bool) -> None:
    net, ids = model(tie_word_embeddings=tied), tokens(1, 9)
    before = logits(net, ids)
    net.resize_token_embeddings(V + 7, mean_resizing=mean_resizing)
    after = logits(net, ids)
    assert net.config.vocab_size == V + 7 and after.shape[-1] == V + 7
    assert_close(after[..., :V], before)
    for weight in (net.model.embed_tokens.weight, net.lm_head.weight):
        assert weight[V:].norm(dim=1).min() > 1e-3
    assert (net.lm_head.weight is net.model.embed_tokens.weight) == tied
    new = torch.tensor([[V + 6, 3, V]])
    net(new, labels=new).loss.backward()
    assert net.generate(new, max_new_tokens=3, pad_token_id=0).shape == (1, 6)
    net.resize_token_embeddings(V)
    assert_close(logits(net, ids), before)


def test_tied_embeddings_are_one_parameter_and_saved_once(tmp_path) -> None:
    net, ids = model(tie_word_embeddings=True), tokens(1, 9)
    assert "lm_head.weight" not in dict(net.named_parameters())
    net(ids, labels=ids).loss.backward()
    assert net.lm_head.weight.grad is net.model.embed_tokens.weight.grad
    net.save_pretrained(tmp_path)
    loaded = MiniMaxM1ForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded(ids).logits, net(ids).logits)


# Adapters


@pytest.mark.parametrize("targets", [PROJECTIONS, ["lm_head"], [*PROJECTIONS, "lm_head"]], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_adapters_train_merge_and_travel(targets: list[str], tmp_path) -> None:
    ids = tokens(2, 20)
    settings = LoraConfig(target_modules=targets, r=4, task_type="CAUSAL_LM")
    net = get_peft_model(model(), settings)
    adapted = {
        name.split(".lora_A")[0].split(".")[-1] for name, _ in net.named_parameters() if "lora_A" in name
    }
    assert adapted == set(targets)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = net(ids, labels=ids).loss
        loss.backward()
        assert all(p.grad is not None for p in net.parameters() if p.requires_grad)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    with torch.no_grad():
        trained = net(ids).logits
        assert (trained - model()(ids).logits).abs().max() > 1e-3
        net.save_pretrained(tmp_path)
        loaded = PeftModel.from_pretrained(model(), tmp_path)
        assert_close(loaded(ids).logits, trained)
        assert torch.equal(
            loaded.generate(input_ids=ids, max_new_tokens=4, do_sample=False, pad_token_id=0),
            net.generate(input_ids=ids, max_new_tokens=4, do_sample=False, pad_token_id=0),
        )
        merged = net.merge_and_unload()
        assert_close(merged(ids).logits, trained)


# Wrappers


@pytest.fixture
def one_rank(tmp_path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("narrow", [False, True])
def test_fully_sharded_data_parallel_fits(one_rank: None, narrow: bool) -> None:
    """Each layer and the whole sharded; with bf16 parameters the logits are float32 all the same."""
    net, ids = model(), tokens(2, 20)
    loss, grads = gradients(net, ids)
    log_probs = net.log_probs(ids).detach()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if narrow else MixedPrecisionPolicy()
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(net, "log_probs")
    net.zero_grad()
    out = net(ids, labels=ids, output_router_logits=True)
    assert out.logits.dtype == torch.float32
    out.loss.backward()
    assert difference(out.loss.detach(), loss) < (0.05 if narrow else 1e-5)
    for name, p in net.named_parameters():
        grad = p.grad.full_tensor().float().flatten()
        assert torch.cosine_similarity(grad, grads[name].flatten(), dim=0) > (0.85 if narrow else 0.9999), (
            name
        )
    # this leaves the outermost parameters gathered, so gradients were read first
    assert difference(net.log_probs(ids).detach(), log_probs) < (0.3 if narrow else 1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call")
def test_a_traced_model_gives_the_same_logits() -> None:
    net, ids = model(num_hidden_layers=2, attn_type_list=[0, 1]), tokens(2, 5)
    with torch.no_grad():
        traced = torch.compile(net, backend="aot_eager")(ids, use_cache=False)
        assert_close(traced.logits, net(ids, use_cache=False).logits)


# What comes out, what may come in


def test_records_are_kept_on_request_only() -> None:
    net, ids = model(), tokens(2, 9)
    plain = net(ids)
    assert (
        plain.hidden_states is plain.attentions is plain.router_logits is plain.aux_loss is plain.loss is None
    )
    out = net(ids, output_hidden_states=True, output_router_logits=True)
    assert len(out.hidden_states) == len(KINDS) + 1
    assert torch.equal(out.hidden_states[0], net.model.embed_tokens(ids))
    assert torch.equal(net.lm_head(out.hidden_states[-1]), out.logits)
    assert [tuple(x.shape) for x in out.router_logits] == [(18, 4)] * len(KINDS)
    assert torch.equal(out.logits, plain.logits)


def test_a_tuple_can_be_had() -> None:
    net, ids = model(), tokens(2, 9)
    out = net(ids, labels=ids, return_dict=False, use_cache=False)
    assert isinstance(out, tuple) and torch.equal(out[1], net(ids).logits)
    assert torch.equal(net.model(ids, return_dict=False, use_cache=False)[0], net.model(ids)[0])


def test_embeddings_can_stand_for_tokens() -> None:
    net, ids = model(), tokens(2, 9)
    assert torch.equal(net(inputs_embeds=net.model.embed_tokens(ids)).logits, net(ids).logits)
    for inputs in ({}, {"input_ids": ids, "inputs_embeds": net.model.embed_tokens(ids)}):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            net(**inputs)


@pytest.mark.parametrize("ids", [torch.tensor([3]), torch.tensor([[[3]]])], ids=["1-D", "3-D"])
def test_tokens_of_another_rank_are_refused(ids: Tensor) -> None:
    with pytest.raises(ValueError, match=r"input_ids must be \(batch, positions\)"):
        model()(ids)


@pytest.mark.parametrize("token", [-1, V])
def test_a_token_outside_the_vocabulary_is_named(token: int) -> None:
    with pytest.raises(ValueError, match=f"token id {token} is not in the vocabulary of {V}"):
        model()(torch.tensor([[3, token]]))


@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0)], ids=str)
def test_an_empty_input_is_refused_and_leaves_a_cache_as_it_is(shape: tuple[int, int]) -> None:
    net, ids = model(), tokens(2, 70)
    cache = HybridCache(net.config)
    with torch.no_grad():
        net(ids[:, :66], past_key_values=cache)
        with pytest.raises(ValueError, match="the input is empty"):
            net(torch.zeros(shape, dtype=torch.long), past_key_values=cache)
        with pytest.raises(ValueError, match="the input is empty"):
            net(inputs_embeds=torch.zeros(*shape, 32))
        rest = net(ids[:, 66:], past_key_values=cache).logits
        assert_close(rest, net(ids).logits[:, 66:])


# Decode and forward, bit by bit


def test_labels_of_another_shape_are_refused() -> None:
    net = model()
    with pytest.raises(ValueError, match=r"labels must be \(B, T\) = \(2, 9\).*got \(2, 8\)"):
        net(tokens(2, 9), labels=tokens(2, 8))
