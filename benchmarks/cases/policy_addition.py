"""CISPO on the demo model's additions, from the shipped checkpoint to (almost) all of them right.

    python -m benchmarks.run --case policy_addition             minutes on one core for each seed

The same run by itself: `minimax-hybrid train scripts/rl_addition.toml`.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoTokenizer

from minimax_hybrid import MiniMaxM1ForCausalLM
from minimax_hybrid.cost.plotting import INK, picture
from minimax_hybrid.rl.run_folder import read_log
from minimax_hybrid.rl.settings import read_settings
from minimax_hybrid.rl.trainer import Trainer, find_task
from minimax_hybrid.text import DEMO

from ..harness.measure import each
from ..harness.pages import markdown
from ..harness.plot import over_batches
from ..harness.rows import ROOT, Row, measured

ABOUT = "CISPO on the demo model's additions, from the shipped checkpoint to almost all of them right"
TESTS = ("tests/benchmarks/test_policy.py", "-k", "addition")
SETTINGS = ROOT / "scripts" / "rl_addition.toml"
UNITS = {"reward": "1", "length": "tokens", "greedy": "share", "seconds": "s"}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=1, help="runs at a time, of one thread each")


def run(options: argparse.Namespace) -> Iterator[Row]:
    torch.set_num_threads(1)
    jobs = [(options.model, seed, 1 if options.quick else None, options.words) for seed in options.seeds]
    yield from each(train, jobs, processes=options.processes)


def train(model: str, seed: int, batches: int | None = None, words: str = "") -> list[Row]:
    """One run: greedy accuracy, reward, length, and seconds of rollout and training so far, by batch."""
    with TemporaryDirectory() as folder:
        settings = replace(read_settings(SETTINGS), output=folder, seed=seed, save_every=1000)
        settings = replace(settings, batches=batches or settings.batches)
        policy = MiniMaxM1ForCausalLM.from_pretrained(model, dtype=torch.float32)
        Trainer(policy, AutoTokenizer.from_pretrained(model), find_task(settings.task), settings).train()
        log = read_log(Path(folder) / "log.jsonl")
    return [
        measured(
            list(curve.values()),
            at=list(curve),
            case="policy_addition",
            side="cispo",
            task="addition",
            seed=seed,
            metric=name,
            unit=UNITS[name],
            options=words,
        )  # fmt: skip
        for name, curve in curves(log).items()
    ]


def curves(log: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """What is kept of a run's log, by batch."""
    found: dict[str, dict[int, float]] = {name: {} for name in UNITS}
    seconds = 0.0
    for line in log:
        if line["kind"] == "batch":
            seconds += line["seconds"]
            for name in ("reward", "length"):
                found[name][line["batch"]] = line[name]
        if line["kind"] == "evaluation":
            found["greedy"][line["batch"]] = line["greedy_accuracy"]
            found["seconds"][line["batch"]] = round(seconds, 1)
    return found


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
