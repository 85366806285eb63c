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
from ..harness.rows import ROOT, Row

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
    seconds = {row.seed: row for row in rows if row.metric == "seconds"}
    greedy = [row for row in rows if row.metric == "greedy"]
    batches = greedy[0].at[::2]
    lines = []
    for row in greedy:
        found = dict(zip(row.at, row.values, strict=True))
        time = dict(zip(seconds[row.seed].at, seconds[row.seed].values, strict=True))[batches[-1]]
        lines.append([f"{row.seed}", *(f"{found[b]:.3f}" for b in batches), f"{time:.0f} s"])
    return markdown(["seed", *(f"batch {b}" for b in batches), "rollouts and training"], lines, text=1)


def draw(rows: list[Row], folder: Path) -> list[Path]:
    path = folder / "policy_addition.svg"
    seconds = {row.seed: row.values[-1] for row in rows if row.metric == "seconds"}
    with picture(path) as (axis,):
        greedy = [row for row in rows if row.metric == "greedy"]
        for row, color in zip(greedy, ("hybrid", "softmax", "lightning", "other"), strict=False):
            over_batches(axis, [row], color=color, label=f"seed {row.seed}, {seconds[row.seed]:.0f} s")
        axis.axhline(0.99, color=INK, lw=0.8, ls="--")
        axis.set_title("greedy accuracy, held out")
        axis.set_xlabel("batches of 1,024 responses")
        axis.legend()
    return [path]
