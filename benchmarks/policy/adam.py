"""AdamW as the report sets it, (0.9, 0.95) and eps 1e-15, against the default (0.9, 0.999) and 1e-8.

    python -m benchmarks.policy.adam             ten minutes on one core
    python -m benchmarks.policy.adam --plot      only draw what was measured

The report saw gradients from 1e-18 to 1e-5, most below 1e-14. The demo model's are far larger, so each
setting also runs with all gradients (and the clipping threshold) multiplied by 1e-10. Adam divides the scale
out again, but for eps.
"""

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoTokenizer

from benchmarks.policy.addition import SETTINGS
from benchmarks.policy.records import FIGURES, Row, each, read_rows, write_rows
from minimax_hybrid import MiniMaxM1ForCausalLM
from minimax_hybrid.rl.run_folder import read_log
from minimax_hybrid.rl.settings import read_settings
from minimax_hybrid.rl.trainer import Trainer, find_task
from minimax_hybrid.text import DEMO

ADAMS = {"report": ((0.9, 0.95), 1e-15), "default": ((0.9, 0.999), 1e-8)}
SCALES = (1.0, 1e-10)
EDGES = [10.0**k for k in range(-24, 2)]


class Watched(Trainer):
    """A trainer that scales gradients and counts how large their elements are."""

    histogram: torch.Tensor

    def log_update(self, update: int, *rest: object) -> None:
        super().log_update(update, *rest)
        flat = torch.cat([p.grad.abs().flatten() for p in self.parameters if p.grad is not None])
        places = torch.bucketize(flat, torch.tensor(EDGES))
        self.histogram += torch.bincount(places, minlength=len(EDGES) + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--batches", type=int, default=15)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--plot", action="store_true", help="draw from the committed rows, measure nothing")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time, of one thread each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.plot:
        rows: list[Row] = []
        jobs = list(product([args.model], ADAMS, SCALES, [args.batches], args.seeds))
        for found in each(run, jobs, processes=args.processes):
            rows += found
            write_rows("adam", rows)
    plot()


def run(model: str, name: str, scale: float, batches: int, seed: int) -> list[Row]:
    with TemporaryDirectory() as folder:
        settings = read_settings(SETTINGS)
        settings = replace(
            settings,
            output=folder,
            seed=seed,
            batches=batches,
            prompts=min(settings.prompts, 32),
            responses=min(settings.responses, 8),
            learning_rate=5e-5,
            dynamic_sampling=None,
            later=(),
            save_every=1000,
            evaluate_every=1,
            evaluation_problems=200,
            max_grad_norm=settings.max_grad_norm * scale,
        )
        policy = MiniMaxM1ForCausalLM.from_pretrained(model, dtype=torch.float32)
        trainer = Watched(policy, AutoTokenizer.from_pretrained(model), find_task(settings.task), settings)
        trainer.histogram = torch.zeros(len(EDGES) + 1, dtype=torch.long)
        betas, eps = ADAMS[name]
        trainer.optimizer = torch.optim.AdamW(
            trainer.parameters, lr=settings.learning_rate, betas=betas, eps=eps, weight_decay=0.0
        )
        for parameter in trainer.parameters:
            parameter.register_hook(lambda gradient: gradient * scale)
        trainer.train()
        log = read_log(Path(folder) / "log.jsonl")
    key = {"adam": name, "scale": scale, "seed": seed}
    curve = [
        {**key, "batch": line["batch"], "greedy": line["greedy_accuracy"]}
        for line in log
        if line["kind"] == "evaluation"
    ]
    return [*curve, {**key, "edges": EDGES, "gradients": trainer.histogram.tolist()}]


def plot() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "adam"
    import matplotlib.pyplot as plt

    rows = read_rows("adam")
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.4))
    for scale, style in zip(SCALES, ("-", "--"), strict=True):
        for name, colour in zip(ADAMS, ("tab:blue", "tab:red"), strict=True):
            mine = [row for row in rows if (row["adam"], row["scale"]) == (name, scale)]
            for seed in sorted({row["seed"] for row in mine}):
                curve = [row for row in mine if "greedy" in row and row["seed"] == seed]
                left.plot(
                    [r["batch"] for r in curve],
                    [r["greedy"] for r in curve],
                    style,
                    color=colour,
                    linewidth=1,
                    label=None if seed else f"{name}, gradients x {scale:g}",
                )
            if name == "report":
                counts = mine[-1]["gradients"]
                share = [count / sum(counts) for count in counts[1:]]
                right.step(EDGES, share, style, where="post", color="0.3", label=f"x {scale:g}")
    left.set_xlabel("batches")
    left.set_ylabel("greedy accuracy, held out")
    left.legend(frameon=False, fontsize=8, ncol=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    right.set_xscale("log")
    right.set_xlabel("size of a gradient's element")
    right.set_ylabel("share")
    right.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(FIGURES / "policy_adam.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
