"""CISPO on the demo model's additions, from the shipped checkpoint to (almost) all of them right.

    python -m benchmarks.run --case policy_addition             minutes on one core for each seed

The same run by itself: `minimax-hybrid train scripts/rl_addition.toml`.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from minimax_hybrid.cost.plotting import INK, picture
from minimax_hybrid.rl.settings import read_settings
from minimax_hybrid.text import DEMO

from ..harness import policy
from ..harness.measure import each
from ..harness.pages import markdown
from ..harness.plot import over_batches
from ..harness.rows import ROOT, Row, grouped

ABOUT = "CISPO on the demo model's additions, from the shipped checkpoint to almost all of them right"
TESTS = ("tests/benchmarks/test_policy.py", "-k", "addition")
SETTINGS = ROOT / "scripts" / "rl_addition.toml"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=str(DEMO))
    policy.options(parser)


def run(options: argparse.Namespace) -> Iterator[Row]:
    jobs = [(options.model, seed, 1 if options.quick else None) for seed in options.seeds]
    yield from each(train, jobs, processes=options.processes)


def train(model: str, seed: int, batches: int | None = None) -> list[Row]:
    """One run: greedy accuracy, reward, length, and seconds of rollout and training so far, by batch."""
    settings = read_settings(SETTINGS)
    settings = replace(settings, seed=seed, batches=batches or settings.batches)
    _, log = policy.trained(model, settings)
    what = dict(case="policy_addition", side="cispo", task="addition", seed=seed)
    return list(policy.curve_rows(curves(log), **what))


def curves(log: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """What is kept of a run's log, by batch."""
    batches = {line["batch"]: line for line in log if line["kind"] == "batch"}
    greedy = {line["batch"]: line["greedy_accuracy"] for line in log if line["kind"] == "evaluation"}
    seconds = [0.0, *accumulate(line["seconds"] for line in batches.values())]
    return {
        "reward": {batch: line["reward"] for batch, line in batches.items()},
        "length": {batch: line["length"] for batch, line in batches.items()},
        "greedy": greedy,
        "seconds": {batch: round(seconds[batch], 1) for batch in greedy},
    }


def table(rows: list[Row]) -> str:
    of = grouped(rows, "metric")
    batches = of["greedy",][0].at[::2]
    lines = []
    for greedy, seconds in zip(of["greedy",], of["seconds",], strict=True):
        found, took = (dict(zip(row.at, row.values, strict=True)) for row in (greedy, seconds))
        shares = (f"{found[batch]:.3f}" for batch in batches)
        lines.append([str(greedy.seed), *shares, f"{took[batches[-1]]:.0f} s"])
    return markdown(["seed", *(f"batch {b}" for b in batches), "rollouts and training"], lines, text=1)


def draw(rows: list[Row], folder: Path) -> list[Path]:
    path = folder / "policy_addition.svg"
    of = grouped(rows, "metric")
    with picture(path) as (axis,):
        colors = ("hybrid", "softmax", "lightning", "other")
        for row, seconds, color in zip(of["greedy",], of["seconds",], colors, strict=False):
            label = f"seed {row.seed}, {seconds.values[-1]:.0f} s"
            over_batches(axis, [row], color=color, label=label)
        axis.axhline(0.99, color=INK, lw=0.8, ls="--")
        axis.set(title="greedy accuracy, held out", xlabel="batches of 1,024 responses")
        axis.legend()
    return [path]
