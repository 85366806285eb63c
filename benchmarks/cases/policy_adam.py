"""AdamW as the report sets it, (0.9, 0.95) and eps 1e-15, against the default (0.9, 0.999) and 1e-8.

    python -m benchmarks.run --case policy_adam             ten minutes on one core

The report saw gradients from 1e-18 to 1e-5, most below 1e-14. The demo model's are far larger, so each
setting also runs with all gradients (and the clipping threshold) multiplied by 1e-10. Adam divides the scale
out again, but for eps.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minimax_hybrid.cost.plotting import INK, picture
from minimax_hybrid.rl.settings import read_settings
from minimax_hybrid.rl.trainer import Trainer

from ..harness import policy
from ..harness.measure import each
from ..harness.pages import markdown
from ..harness.plot import over_batches
from ..harness.rows import Row, grouped, measured
from . import policy_addition

ABOUT = "AdamW as the report sets it against the default, with gradients as they are and 1e-10 times as large"
TESTS = ("tests/benchmarks/test_policy.py", "-k", "adam")
ADAMS = {"report": ((0.9, 0.95), 1e-15), "default": ((0.9, 0.999), 1e-8)}
SCALES = (1.0, 1e-10)
EDGES = [10.0**k for k in range(-24, 2)]


class Watched(Trainer):
    """A trainer with one of ADAMS that scales gradients and counts how large their elements are."""

    def __init__(self, adam: str, scale: float, *parts: Any):
        super().__init__(*parts)
        (betas, eps), rate = ADAMS[adam], self.settings.learning_rate
        self.optimizer = torch.optim.AdamW(self.parameters, lr=rate, betas=betas, eps=eps, weight_decay=0.0)
        for parameter in self.parameters:
            parameter.register_hook(lambda gradient: gradient * scale)
        self.histogram = torch.zeros(len(EDGES) + 1, dtype=torch.long)

    def log_update(self, update: int, loss: float, norm: float, scored: dict[str, Tensor]) -> None:
        super().log_update(update, loss, norm, scored)
        flat = torch.cat([p.grad.abs().flatten() for p in self.parameters if p.grad is not None])
        bins = torch.bucketize(flat, torch.tensor(EDGES))
        self.histogram += torch.bincount(bins, minlength=len(EDGES) + 1)


def options(parser: argparse.ArgumentParser) -> None:
    policy_addition.options(parser)
    parser.add_argument("--batches", type=int, default=15)


def run(options: argparse.Namespace) -> Iterator[Row]:
    batches = 1 if options.quick else options.batches
    jobs = list(product([options.model], ADAMS, SCALES, [batches], options.seeds))
    yield from each(train, jobs, processes=options.processes)


def train(model: str, name: str, scale: float, batches: int, seed: int) -> list[Row]:
    """Greedy accuracy by batch, and how many elements of all gradients lie in each decade from `EDGES` on."""
    settings = read_settings(policy_addition.SETTINGS)
    settings = replace(
        settings, seed=seed, batches=batches, prompts=min(settings.prompts, 32),
        responses=min(settings.responses, 8), learning_rate=5e-5, dynamic_sampling=None, later=(),
        evaluate_every=1, evaluation_problems=200, max_grad_norm=settings.max_grad_norm * scale,
    )  # fmt: skip
    trainer, log = policy.trained(model, settings, trainer=partial(Watched, name, scale))
    what = dict(case="policy_adam", side=name, task=f"gradients x {scale:g}", seed=seed)
    greedy = {"greedy": policy_addition.curves(log)["greedy"]}
    counts = measured(trainer.histogram.tolist(), at=[0.0, *EDGES], **what, metric="elements from", unit="1")
    return [*policy.curve_rows(greedy, **what), counts]


def table(rows: list[Row]) -> str:
    greedy = grouped([row for row in rows if row.metric == "greedy"], "task", "side")
    batches = rows[0].at[::5]
    lines = []
    for (task, name), seeds in sorted(greedy.items(), key=lambda group: group[0][0]):
        cells = (", ".join(f"{row.values[batch]:.3f}" for row in seeds) for batch in batches)
        lines.append([name, task.removeprefix("gradients x "), *cells])
    return markdown(["AdamW", "gradients times", *(f"batch {b}" for b in batches)], lines)


def draw(rows: list[Row], folder: Path) -> list[Path]:
    path, styles = folder / "policy_adam.svg", {"gradients x 1": "-"}
    groups = sorted(grouped(rows, "task", "metric", "side").items(), key=lambda group: group[0][0])
    with picture(path, panels=2) as (left, right):
        for (task, metric, name), of in groups:
            style, shown = styles.get(task, "--"), f"{name}, {task}"
            if metric == "greedy":
                color = "hybrid" if name == "report" else "softmax"
                over_batches(left, of, color=color, style=style, label=shown)
            elif name == "report":
                counts = of[-1]
                share = [count / sum(counts.values) for count in counts.values[1:]]
                right.step(counts.at[1:], share, style, where="post", color=INK, label=task)
        left.set(xlabel="batches", title="greedy accuracy, held out")
        left.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 0.1))
        right.set(xlabel="size of a gradient's element", title="share of elements", xscale="log")
        right.legend(fontsize=8)
    return [path]
