"""FSDP2 on the model as it is loaded: bfloat16 with float32 routers, and perhaps a float32 head."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from ranks import run_on_ranks
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import minimax_hybrid
from minimax_hybrid import MiniMaxM1ForCausalLM
from minimax_hybrid.parallel.fsdp import shard

DEMO = Path(minimax_hybrid.__file__).parent / "demo"
BF16, F32 = torch.bfloat16, torch.float32
pytestmark = pytest.mark.slow


def load(dtype: torch.dtype = BF16, *, wide_head: bool = False) -> MiniMaxM1ForCausalLM:
    model = MiniMaxM1ForCausalLM.from_pretrained(DEMO, dtype=dtype)
    if wide_head:
        model.lm_head.float()
    return model


def by_plain_loop(model: MiniMaxM1ForCausalLM) -> MiniMaxM1ForCausalLM:
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def by_accelerate(model: MiniMaxM1ForCausalLM) -> nn.Module:
    """What accelerate does to a model under FSDP2; a CPU has no other way to it."""
    accelerator = Accelerator(cpu=True)
    AcceleratorState._shared_state["fsdp_plugin"] = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=True
    )
    return fsdp2_prepare_model(accelerator, model)


def tokens() -> tuple[Tensor, list[Tensor]]:
    """Four sequences (4, 40), and the two that each of two ranks has."""
    torch.manual_seed(0)
    ids = torch.randint(4, 101, (4, 40))
    return ids, list(ids.split(2))


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return -model.log_probs(ids).mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in model.named_parameters()
    }


def same_as_one_process(how: str, head: str) -> None:
    sharding = {"plain_loop": by_plain_loop, "shard": shard, "accelerate": by_accelerate}[how]
    one = load(wide_head=head == "wide")
    model = sharding(load(wide_head=head == "wide"))
    parts = tokens()[1]
    mine = parts[dist.get_rank()]
    assert {p.dtype for p in model.parameters()} == {BF16, F32}
    # the first use is log_probs, without a call before it
    scores = (m.log_probs(mine, entropy=True) for m in (model, one))
    assert all(torch.equal(found, wanted) for found, wanted in zip(*scores, strict=True))
    found, wanted = model(mine, labels=mine), one(mine, labels=mine)
    assert torch.equal(found.logits, wanted.logits) and torch.equal(found.loss, wanted.loss)
    options = dict(max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(mine, **options), one.generate(mine, **options))
    wanted = []
    for part in parts:
        one.zero_grad()
        loss(one, part).backward()
        wanted.append(gradients(one))
    loss(model, mine).backward()
    for name, gradient in gradients(model).items():
        both = (wanted[0][name] + wanted[1][name]) / 2
        assert gradient.dtype == both.dtype and torch.equal(gradient, both), name


def training_agrees() -> None:
    """Two steps of two micro-batches each, clipped, in float32: one process sees them all."""
    one, model = load(F32), by_plain_loop(load(F32))
    ids, parts = tokens()
    mine = parts[dist.get_rank()]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-6) for m in (one, model)]
    for _ in range(2):
        norms = []
        for m, batch, optimizer in zip((one, model), (ids, mine), optimizers, strict=True):
            for i, micro in enumerate(batch.chunk(2)):
                if m is model:
                    m.set_requires_gradient_sync(i == 1)
                (loss(m, micro) / 2).backward()
            norm = nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(model(mine).logits, one(mine).logits, rtol=1e-4, atol=1e-4)


def idle_experts() -> None:
    """Rank 0 uses two of four experts and rank 1 the others; all of them learn."""
    model = by_plain_loop(load())
    mine = tokens()[1][dist.get_rank()]
    B, T = mine.shape
    pair = torch.tensor([0, 1]) + 2 * dist.get_rank()
    routed = pair.expand(B, T, model.config.num_hidden_layers, 2)
    (-model.log_probs(mine, routed_experts=routed).mean()).backward()
    gradient = model.model.layers[0].block_sparse_moe.experts.down_proj.grad.full_tensor()
    assert (gradient.flatten(1).abs().amax(1) > 0).all()


@pytest.mark.parametrize("head", ["narrow", "wide"])
@pytest.mark.parametrize("how", ["plain_loop", "shard", "accelerate"])
def test_logits_log_probs_tokens_and_gradients_equal_one_process(how: str, head: str) -> None:
    run_on_ranks(same_as_one_process, how, head)


def test_clipping_and_accumulation_agree_with_one_process() -> None:
    run_on_ranks(training_agrees)


def test_experts_without_tokens_do_not_hang() -> None:
    run_on_ranks(idle_experts)
