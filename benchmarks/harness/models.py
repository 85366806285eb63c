"""What a model does for a task: "prefill", "decode" or "train"; and the small model of three cases."""

import torch
from torch import nn
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from minimax_hybrid.compat import CACHE_NAME as _NAME
from minimax_hybrid.config import MiniMaxM1Config

from .measure import Task, Work, device


def small_config() -> MiniMaxM1Config:
    """About the demo's size; small enough to take its softmax twin to 64K tokens on a CPU."""
    return MiniMaxM1Config(
        vocab_size=8192, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, rotary_dim=32, num_local_experts=8, max_position_embeddings=2**20,
        rope_theta=1e7,
    )  # fmt: skip


def model_work(model: nn.Module, task: Task) -> Work:
    rng = torch.Generator().manual_seed(task.length)
    ids = torch.randint(1, 8192, (task.batch, task.length), generator=rng).to(device())
    return {"prefill": _prefill, "decode": _decode, "train": _train}[task.kind](model, ids)


def _prefill(model: nn.Module, ids: torch.Tensor) -> Work:
    model.eval()

    @torch.inference_mode()
    def work() -> torch.Tensor:
        return model(ids, use_cache=True, logits_to_keep=1).logits

    return work


def _decode(model: nn.Module, ids: torch.Tensor) -> Work:
    """One step of a batch of the same prompt; the context grows by a token each call."""
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
        # transformers' class asks its first layer for the length, which has none: both are given it
        positions = torch.tensor([[position]], device=ids.device)
        position += 1
        return model(token, position_ids=positions, use_cache=True, **{_NAME: memory}).logits

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
