"""This model beside transformers' own MiniMax class, with the same weights: the same function."""

from functools import lru_cache

import torch
from torch import nn
from transformers import MiniMaxConfig, MiniMaxForCausalLM

from minimax_hybrid.config import MiniMaxM1Config, to_transformers
from minimax_hybrid.model import MiniMaxM1ForCausalLM

from ..harness.measure import Task, Work, device
from ..harness.models import model_work

ABOUT = (
    "this model against transformers' own MiniMax class with the same weights: 8 layers of width 512, 8 "
    "heads of 64, 2 key/value heads, 8 experts (2 chosen) of 1,024, vocabulary 8,192, whole heads rotated"
)
TESTS = ("tests/benchmarks/test_models.py", "-k", "transformers")
SIDES = ("ours", "transformers")
_DECODED = [(1024, 1), (1024, 8), (16384, 1), (16384, 8)]
TASKS = tuple(
    task
    for dtype in ("float32", "bfloat16")
    for task in (
        *(Task("prefill", T, dtype=dtype, memory=True) for T in (1024, 4096, 16384)),
        *(Task("decode", T, B, dtype, rounds=40, memory=(T, B) == (16384, 8)) for T, B in _DECODED),
        Task("train", 2048, 2, dtype, memory=True),
    )
)
QUICK = (Task("prefill", 1024, rounds=2), Task("decode", 1024, rounds=5))


def config() -> MiniMaxM1Config:
    """About 119 M parameters; rotates whole heads, as transformers' class does."""
    return MiniMaxM1Config(
        vocab_size=8192, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, rotary_dim=64, num_local_experts=8, max_position_embeddings=2**17,
        rope_theta=1e7,
    )  # fmt: skip


def prepare(side: str, task: Task) -> Work:
    return model_work(_model(side, task.dtype), task)


@lru_cache(maxsize=2)
def _model(side: str, dtype: str) -> nn.Module:
    return model(side, dtype, config())


def model(side: str, dtype: str, config: MiniMaxM1Config) -> nn.Module:
    torch.manual_seed(0)
    ours = MiniMaxM1ForCausalLM(config)
    found = ours if side == "ours" else to_transformers_class(ours)
    return found.to(getattr(torch, dtype)).to(device())


def to_transformers_class(model: MiniMaxM1ForCausalLM) -> MiniMaxForCausalLM:
    """transformers' own class with these weights: the same function where `rotary_dim` is a whole head."""
    config = MiniMaxConfig.from_dict(to_transformers(model.config))
    config._attn_implementation = "sdpa"
    theirs = MiniMaxForCausalLM(config)
    theirs.set_experts_implementation("grouped_mm")
    weights = {name.replace("block_sparse_moe", "mlp"): x for name, x in model.state_dict().items()}
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    buffers = {name for name, _ in theirs.named_buffers()}  # the lightning layers' decay tables
    if unexpected or set(missing) - buffers:
        raise ValueError(
            f"transformers' class does not take the weights: missing {missing}, unexpected {unexpected}"
        )
    return theirs
