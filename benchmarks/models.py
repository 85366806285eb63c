"""The models that are timed, and what each does for a task: "prefill", "decode" or "train"."""

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import MiniMaxConfig, MiniMaxForCausalLM
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from minimax_hybrid.compat import CACHE_NAME as _NAME
from minimax_hybrid.config import MiniMaxM1Config, to_transformers
from minimax_hybrid.cost.counts import softmax_twin
from minimax_hybrid.model import MiniMaxM1ForCausalLM

from .measure import Work

if TYPE_CHECKING:
    from .cases import Task


def native_config() -> MiniMaxM1Config:
    """About 119 M parameters; for the comparison with transformers' class, which rotates whole heads."""
    return MiniMaxM1Config(
        vocab_size=8192, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, rotary_dim=64, num_local_experts=8, max_position_embeddings=2**17,
        rope_theta=1e7,
    )  # fmt: skip


def small_config() -> MiniMaxM1Config:
    """About the demo's size; small enough to take its softmax twin to 64K tokens on a CPU."""
    return MiniMaxM1Config(
        vocab_size=8192, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, rotary_dim=32, num_local_experts=8, max_position_embeddings=2**20,
        rope_theta=1e7,
    )  # fmt: skip


def native_work(side: str, task: "Task") -> Work:
    return _work(_native_pair(task.dtype, side), task)


def twin_work(side: str, task: "Task") -> Work:
    return _work(_twin(side, task.dtype), task)


model_work = twin_work


@lru_cache(maxsize=2)
def _native_pair(dtype: str, side: str) -> nn.Module:
    torch.manual_seed(0)
    ours = MiniMaxM1ForCausalLM(native_config())
    model = ours if side == "ours" else to_native(ours)
    return model.to(getattr(torch, dtype)).to(_device())


@lru_cache(maxsize=2)
def _twin(side: str, dtype: str) -> nn.Module:
    torch.manual_seed(0)
    config = small_config() if side == "hybrid" else softmax_twin(small_config())
    return MiniMaxM1ForCausalLM(config).to(getattr(torch, dtype)).to(_device())


def to_native(model: MiniMaxM1ForCausalLM) -> MiniMaxForCausalLM:
    """transformers' own class with these weights: the same function where `rotary_dim` is a whole head."""
    config = MiniMaxConfig.from_dict(to_transformers(model.config))
    config._attn_implementation = "sdpa"
    native = MiniMaxForCausalLM(config)
    native.set_experts_implementation("grouped_mm")
    weights = {name.replace("block_sparse_moe", "mlp"): x for name, x in model.state_dict().items()}
    missing, unexpected = native.load_state_dict(weights, strict=False)
    buffers = {name for name, _ in native.named_buffers()}  # the lightning layers' decay tables
    if unexpected or set(missing) - buffers:
        raise ValueError(
            f"transformers' class does not take the weights: missing {missing}, unexpected {unexpected}"
        )
    return native


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _work(model: nn.Module, task: "Task") -> Work:
    rng = torch.Generator().manual_seed(task.length)
    ids = torch.randint(1, 8192, (task.batch, task.length), generator=rng).to(_device())
    return {"prefill": _prefill, "decode": _decode, "train": _train}[task.kind](model, ids)


def _prefill(model: nn.Module, ids: torch.Tensor) -> Work:
    model.eval()

    @torch.inference_mode()
    def work() -> torch.Tensor:
        return model(ids, use_cache=True, logits_to_keep=1).logits

    return work


def _decode(model: nn.Module, ids: torch.Tensor) -> Work:
    """One step of a batch, all of whose rows hold the same prompt; the context grows by a token each call."""
    model.eval()
    with torch.inference_mode():
        memory = model(ids[:1], use_cache=True, logits_to_keep=1)[_NAME]
        if isinstance(memory, MiniMaxCache):  # its list of states ends with the last lightning layer
            memory.linear_cache += [[] for _ in range(len(memory) - len(memory.linear_cache))]
        memory.batch_repeat_interleave(len(ids))
    token, position = ids[:, -1:], ids.shape[1]

    @torch.inference_mode()
    def work() -> torch.Tensor:
        nonlocal position
        # transformers' class asks its first layer for the length, which has none: tell both
        place = torch.tensor([[position]], device=ids.device)
        position += 1
        return model(token, position_ids=place, use_cache=True, **{_NAME: memory}).logits

    return work


def _train(model: nn.Module, ids: torch.Tensor) -> Work:
    """Forward, loss, backward and AdamW with the report's settings."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), eps=1e-15)

    def work() -> torch.Tensor:
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return work
