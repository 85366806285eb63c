"""CISPO on the demo model's additions, from the shipped checkpoint to (almost) all of them right.

    python -m benchmarks.policy.addition             minutes on one core for each seed
    python -m benchmarks.policy.addition --plot      only draw what was measured

The same run by itself: `minimax-hybrid train scripts/rl_addition.toml`.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoTokenizer

from benchmarks.policy.records import FIGURES, Row, each, read_rows, write_rows
from minimax_hybrid import MiniMaxM1ForCausalLM
from minimax_hybrid.rl.run_folder import read_log
from minimax_hybrid.rl.settings import read_settings
from minimax_hybrid.rl.trainer import Trainer, find_task
from minimax_hybrid.text import DEMO

SETTINGS = Path(__file__).parent.parent.parent / "scripts" / "rl_addition.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=1, help="runs at a time, of one thread each")
    parser.add_argument("--plot", action="store_true", help="draw from the committed rows, measure nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.plot:
        rows: list[Row] = []
        for found in each(run, [(args.model, seed) for seed in args.seeds], processes=args.processes):
            rows += found
            write_rows("addition", rows)
    plot()


def run(model: str, seed: int) -> list[Row]:
    """One run: greedy accuracy, mean reward and seconds of rollout and training so far, by batch."""
    with TemporaryDirectory() as folder:
        settings = replace(read_settings(SETTINGS), output=folder, seed=seed, save_every=1000)
        policy = MiniMaxM1ForCausalLM.from_pretrained(model, dtype=torch.float32)
        Trainer(policy, AutoTokenizer.from_pretrained(model), find_task(settings.task), settings).train()
        log = read_log(Path(folder) / "log.jsonl")
    return rows_of(log, seed)


def rows_of(log: list[Row], seed: int) -> list[Row]:
    """What is kept of a run's log."""
    seconds, rows = 0.0, []
    for line in log:
        if line["kind"] == "batch":
            seconds += line["seconds"]
            rows.append({"batch": line["batch"], "reward": line["reward"], "length": line["length"]})
        if line["kind"] == "evaluation":
            rows.append(
                {"batch": line["batch"], "seconds": round(seconds, 1), "greedy": line["greedy_accuracy"]}
            )
    return [{"seed": seed, **row} for row in rows]


def plot() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "addition"
    import matplotlib.pyplot as plt

    rows = read_rows("addition")
    figure, axis = plt.subplots(figsize=(6, 3.6))
    for seed in sorted({row["seed"] for row in rows}):
        greedy = [row for row in rows if row["seed"] == seed and "greedy" in row]
        axis.plot(
            [r["batch"] for r in greedy],
            [r["greedy"] for r in greedy],
            marker="o",
            markersize=3,
            label=f"seed {seed}, {greedy[-1]['seconds']:.0f} s",
        )
    axis.axhline(0.99, color="0.7", linewidth=0.8, linestyle="--")
    axis.set_xlabel("batches of 1,024 responses")
    axis.set_ylabel("greedy accuracy, held out")
    axis.legend(frameon=False)
    figure.tight_layout()
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(FIGURES / "policy_addition.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
