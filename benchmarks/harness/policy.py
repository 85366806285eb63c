"""Runs of the RL trainer: what each is given, and what is kept of it."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from minimax_hybrid.rl.run_folder import read_log
from minimax_hybrid.rl.settings import TrainSettings
from minimax_hybrid.rl.trainer import Task, Trainer, find_task
from minimax_hybrid.text import load_model, load_tokenizer

from .rows import Row, measured

UNITS = {"greedy": "share", "seconds": "s", "entropy": "nats", "dropped": "share", "length": "tokens",
         "waits": "tokens", "waits_dropped": "tokens"}  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=1, help="runs at a time, of one thread each")


def trained(
    model: Path | str,
    settings: TrainSettings,
    *,
    task: Task | None = None,
    trainer: Callable[..., Trainer] = Trainer,
) -> tuple[Any, list[dict[str, Any]]]:
    """A trainer after its run in a folder that is not kept, and the run's log."""
    with TemporaryDirectory() as folder:
        settings = replace(settings, output=folder, save_every=1000)
        policy, tokenizer = load_model(model, dtype="float32"), load_tokenizer(model)
        done = trainer(policy, tokenizer, task or find_task(settings.task), settings)
        done.train()
        return done, read_log(Path(folder) / "log.jsonl")


def curve_rows(
    curves: dict[str, dict[int, float]], *, case: str, side: str, task: str, seed: int
) -> Iterator[Row]:
    """A row for each curve {batch: value}."""
    for metric, curve in curves.items():
        what = dict(case=case, side=side, task=task, seed=seed, metric=metric, unit=UNITS.get(metric, "1"))
        yield measured(list(curve.values()), at=list(curve), **what)
