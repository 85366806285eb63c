"""transformers' plans on 2 ranks against one process: tensor, expert and FSDP, with the demo checkpoint."""

from pathlib import Path

import pytest
import torch
from ranks import run_on_ranks
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import minimax_hybrid
from minimax_hybrid import HybridCache, MiniMaxM1ForCausalLM

DEMO = Path(minimax_hybrid.__file__).parent / "demo"
CLOSE = dict(rtol=0, atol=1e-5)
PLANS = {
    "auto": dict(tp_plan="auto"),
    "tensor": dict(tp_size=2),
    "tensor_expert": dict(tp_size=2, ep_size=2),
    "fsdp": dict(fsdp_size=2),
    "fsdp_expert": dict(fsdp_size=2, ep_size=2),
}


def load(dtype: torch.dtype, plan: str | None = None) -> MiniMaxM1ForCausalLM:
    options = {}
    if plan is not None:
        options["distributed_config"] = DistributedConfig(**PLANS[plan])
    return MiniMaxM1ForCausalLM.from_pretrained(DEMO, dtype=dtype, **options).eval()


def tokens() -> tuple[Tensor, Tensor]:
    """Two sequences (2, 150), longer than a block, and a mask that hides the second's first 30."""
    torch.manual_seed(0)
    ids = torch.randint(4, 101, (2, 150))
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    return ids, mask


def local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@torch.no_grad()
def cut_by_heads(plan: str) -> None:
    one, model = load(torch.float32), load(torch.float32, plan)
    H, D, M, E, F = 4, 32, 128, 4, 128
    layer = model.model.layers[0]
    experts = layer.block_sparse_moe.experts
    assert local(layer.self_attn.qkv_proj.weight).shape == (3 * H * D // 2, M)
    assert local(layer.self_attn.norm.weight).shape == (H * D // 2,)
    assert local(experts.down_proj).shape == ((E // 2, M, F) if plan == "tensor_expert" else (E, M, F // 2))
    assert local(layer.block_sparse_moe.gate.weight).shape == (E, M)
    assert layer.block_sparse_moe.gate.weight.dtype == torch.float32
    ids, mask = tokens()
    cache, whole = HybridCache(model.config), HybridCache(one.config)
    for part in (ids[:, :70], ids[:, 70:149], ids[:, 149:]):  # a prefill in pieces, then a step
        found, wanted = (m(part, cache=c).logits for m, c in ((model, cache), (one, whole)))
        torch.testing.assert_close(found, wanted, **CLOSE)
    for c in (cache, whole):
        c.reorder_cache(torch.tensor([1, 0]))
        c.crop(149)
    assert cache.layers[0].stored.state.shape[1] == H // 2
    found, wanted = (m(ids.flip(0)[:, 149:], cache=c).logits for m, c in ((model, cache), (one, whole)))
    torch.testing.assert_close(found, wanted, **CLOSE)
    positions = torch.cat([torch.arange(60), torch.arange(90)]).expand(2, -1)
    for options in (dict(attention_mask=mask), dict(position_ids=positions)):
        torch.testing.assert_close(model(ids, **options).logits, one(ids, **options).logits, **CLOSE)
    torch.testing.assert_close(model.log_probs(ids), one.log_probs(ids), **CLOSE)
    options = dict(attention_mask=mask, max_new_tokens=70, do_sample=False)
    assert torch.equal(model.generate(ids, **options), one.generate(ids, **options))


def gradients_of_a_plan(plan: str) -> None:
    """In float32; every rank sees the same batch, so that an average over ranks is the gradient too."""
    one, model = load(torch.float32), load(torch.float32, plan)
    ids, mask = tokens()
    losses = [m(ids, attention_mask=mask, labels=ids, output_router_logits=True).loss for m in (one, model)]
    torch.testing.assert_close(*losses, **CLOSE)
    for loss in losses:
        loss.backward()
    for (name, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
        gradient = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        assert (gradient - q.grad).norm() <= 1e-5 * q.grad.norm(), name


@torch.no_grad()
def fsdp_plan_in_bfloat16() -> None:
    one, model = load(torch.bfloat16), load(torch.bfloat16, "fsdp")
    ids, _ = tokens()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    assert torch.equal(model(ids).logits, one(ids).logits)
    assert torch.equal(model.log_probs(ids), one.log_probs(ids))
    options = dict(max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(ids, **options), one.generate(ids, **options))


def saved_again(folder: str) -> None:
    model = load(torch.bfloat16, "tensor")
    model.save_pretrained(folder)
    dist.barrier()
    again = MiniMaxM1ForCausalLM.from_pretrained(folder)
    for (name, p), q in zip(load(torch.bfloat16).named_parameters(), again.parameters(), strict=True):
        assert p.dtype == q.dtype and torch.equal(p, q), name


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["auto", "tensor_expert"])
def test_logits_caches_and_tokens_of_split_heads_equal_one_process(plan: str) -> None:
    run_on_ranks(cut_by_heads, plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tensor", "tensor_expert", "fsdp", "fsdp_expert"])
def test_gradients_through_a_plan_equal_one_process(plan: str) -> None:
    run_on_ranks(gradients_of_a_plan, plan)


@pytest.mark.slow
def test_the_fsdp_plan_changes_no_bit_of_the_model_as_it_is_loaded() -> None:
    run_on_ranks(fsdp_plan_in_bfloat16)


@pytest.mark.slow
def test_a_split_model_is_saved_as_it_was_loaded(tmp_path: Path) -> None:
    run_on_ranks(saved_again, str(tmp_path))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (dict(tp_size=3), "num_attention_heads = 4 does not divide by 3 ranks"),
        (dict(tp_size=4), "num_key_value_heads = 2 does not divide by 4 ranks"),
        (dict(fsdp_size=3, ep_size=3), "num_local_experts = 4 does not divide by 3 ranks"),
        (dict(pp_size=2), "pipeline parallelism does not carry this model's cache"),
    ],
)
def test_counts_that_do_not_divide_are_refused_before_a_weight_is_read(asked: dict, said: str) -> None:
    config = MiniMaxM1ForCausalLM.config_class.from_pretrained(DEMO)
    with torch.device("meta"):
        model = MiniMaxM1ForCausalLM(config)
    with pytest.raises(ValueError, match=said):
        MiniMaxM1ForCausalLM.maybe_distribute_model(model, DistributedConfig(**asked), None)
