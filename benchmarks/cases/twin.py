"""The hybrid beside its softmax twin: the same model with softmax attention in every layer."""

from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from minimax_hybrid.cost.counts import softmax_twin
from minimax_hybrid.cost.plotting import picture
from minimax_hybrid.model import MiniMaxM1ForCausalLM

from ..harness.measure import Task, Work, device
from ..harness.models import model_work, small_config
from ..harness.plot import over_lengths
from ..harness.rows import Row

ABOUT = (
    "the hybrid against its softmax twin, every layer softmax through SDPA: 8 layers of width 128, 2 heads "
    "of 64, 8 experts (2 chosen) of 256, vocabulary 8,192"
)
TESTS = ("tests/benchmarks/test_models.py", "-k", "twins")
SIDES = ("hybrid", "softmax")
_LENGTHS = tuple(1024 * 2**n for n in range(7))  # 1K to 64K
TASKS = (
    *(Task("prefill", T, rounds=7, memory=T in (1024, 4096, 16384, 65536)) for T in _LENGTHS),
    *(Task("decode", T, rounds=40) for T in _LENGTHS),
)
QUICK = tuple(Task(kind, T, rounds=3) for kind in ("prefill", "decode") for T in (1024, 4096))


def prepare(side: str, task: Task) -> Work:
    return model_work(_model(side, task.dtype), task)


@lru_cache(maxsize=2)
def _model(side: str, dtype: str) -> nn.Module:
    torch.manual_seed(0)
    config = small_config() if side == "hybrid" else softmax_twin(small_config())
    return MiniMaxM1ForCausalLM(config).to(getattr(torch, dtype)).to(device())


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """Prefill, decode and memory over context."""
    panels = (
        ("prefill", "time", "prefill, s", 1.0),
        ("decode", "time", "one decoded token, ms", 1e3),
        ("prefill", "peak memory", "peak memory of prefill, GB", 1e-9),
    )
    measured = [(panel, [row for row in rows if (row.task, row.metric) == panel[:2]]) for panel in panels]
    measured = [(panel, of_panel) for panel, of_panel in measured if of_panel]
    path = folder / "twin.svg"
    with picture(path, panels=len(measured)) as axes:
        for axis, ((_, _, title, scale), of_panel) in zip(axes, measured, strict=True):
            over_lengths(axis, of_panel, scale=scale)
            axis.set(title=title, xlabel="context, tokens")
        axes[0].set_yscale("log")
        for axis in axes[1:]:
            axis.set_ylim(bottom=0)
        axes[0].legend()
    return [path]
