"""CISPO, DAPO and GRPO on the same problems, 16 updates a batch, three seeds each: who learns in fewer steps.

    python -m benchmarks.policy.objectives start addition     trains the model that its runs start from
    python -m benchmarks.policy.objectives run addition       two digits, of which the start solves some
    python -m benchmarks.policy.objectives start recheck
    python -m benchmarks.policy.objectives run recheck        one digit, and a rare first token is what pays
    python -m benchmarks.policy.objectives plot addition      only draws what was measured

In `addition` the start is the demo, its training stopped far earlier. In `recheck` it is a model of two
layers, one lightning and one softmax; a right sum earns 0.2, and 1 if "wait " comes before it, which the
start says in one of two hundred responses: a trust region may drop that token, which CISPO's bound cannot.
"""

import argparse
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.policy.records import FIGURES, Row, each, read_rows, write_rows
from minimax_hybrid import MiniMaxM1Config, MiniMaxM1ForCausalLM
from minimax_hybrid.rl.objective import CISPO, DAPO, GRPO
from minimax_hybrid.rl.rollout import SamplingParams, sample
from minimax_hybrid.rl.run_folder import read_log
from minimax_hybrid.rl.settings import TrainSettings
from minimax_hybrid.rl.tasks import Problem, addition, draw
from minimax_hybrid.rl.trainer import Trainer
from minimax_hybrid.text import DEMO

OBJECTIVES = {"cispo": CISPO(ratio_max=5.0), "dapo": DAPO(), "grpo": GRPO()}
WAIT = "wait "
WINDOW = 10
STARTS = Path("runs/objectives")
SUPERVISED = Path(__file__).parents[2] / "scripts" / "train_demo.py"


def recheck(rng: random.Random, digits: int) -> Problem:
    """`12+34=` -> `46` earns 0.2, `wait 46` earns 1."""
    plain = addition(rng, digits)

    def verify(text: str) -> float:
        right = text.removeprefix(WAIT) == plain.answer
        return right * (1.0 if text.startswith(WAIT) else 0.2)

    return Problem(plain.prompt, verify, rf"({WAIT})?\d+", WAIT + plain.answer)


@dataclass(frozen=True)
class Comparison:
    """A task on which the objectives are compared.

    Args:
        start_at: greedy accuracy on training problems that ends the start's supervised training.
        measured, target: "greedy" accuracy on held-out problems or mean "reward", and how much of it is
            waited for.
    """

    task: Callable[[random.Random, int], Problem]
    digits: int
    start_at: float
    learning_rate: float
    batches: int
    measured: str
    target: float


COMPARISONS = {
    "addition": Comparison(addition, 2, 0.3, 5e-5, 80, "greedy", 0.7),
    "recheck": Comparison(recheck, 1, 0.9, 2e-4, 25, "reward", 0.8),
}


class Watched(Trainer):
    """A trainer that also counts which tokens the trust region drops, and how often each was trained on."""

    def log_update(self, update: int, loss: float, norm: float, scored: dict[str, Tensor]) -> None:
        super().log_update(update, loss, norm, scored)
        objective = self.settings.objective
        r = (scored["log_prob"] - scored["old_log_prob"]).exp()
        A = scored["advantage"]
        dropped = ((A > 0) & (r > objective.trust_max)) | ((A < 0) & (r < objective.trust_min))
        for name, which in (("dropped_tokens_by_id", dropped), ("tokens_by_id", torch.ones_like(dropped))):
            counts = Counter(scored["token"][which].tolist())
            self.counts.setdefault(name, Counter()).update(counts)
        first = scored["token"] == self.tokenizer.encode(WAIT, add_special_tokens=False)[0]
        self.waits.append((int(first.sum()), int((first & dropped).sum())))

    counts: dict[str, Counter]
    waits: list[tuple[int, int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=["start", "run", "plot"])
    parser.add_argument("task", choices=COMPARISONS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batches", type=int, default=None, help="instead of what the task has")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time, of one thread each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.part == "start":
        train_start(args.task)
    if args.part == "run":
        jobs = [(args.task, name, seed, args.batches) for seed in args.seeds for name in OBJECTIVES]
        rows: list[Row] = []
        for found in each(run, jobs, processes=args.processes):
            rows += found
            write_rows(f"objectives_{args.task}", rows)
    if args.part != "start":
        plot(args.task)


def train_start(task: str) -> None:
    """A model from nothing, by supervised learning, until it solves as much as it should."""
    comparison = COMPARISONS[task]
    if task == "addition":
        command = [sys.executable, SUPERVISED, "--stop-at", str(comparison.start_at), "--out", STARTS / task]
        subprocess.run(command, check=True)
        return
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model, digits = MiniMaxM1ForCausalLM(small_config(tokenizer)), comparison.digits
    started = time.monotonic()
    watched = draw(addition, random.Random(1), difficulty=digits, count=200)
    for step, loss in enumerate(supervised(model, tokenizer, random.Random(0), digits=digits, steps=100_000)):
        if step % 50 == 49:
            accuracy, spent = solved(model, tokenizer, watched), time.monotonic() - started
            print(f"step {step + 1}, {spent:.0f} s: loss {loss:.3f}, greedy {accuracy:.3f}", flush=True)
            if accuracy >= comparison.start_at:
                break
    for share, steps in ((0.5, 100), (0.02, 100)):  # first how to say it, then how seldom
        lessons = supervised(
            model, tokenizer, random.Random(1), digits=digits, steps=steps, rate=1e-3, says_wait=share
        )
        print(f"loss {list(lessons)[-1]:.3f}", flush=True)
    print(f'says "wait" with probability {wait_probability(model, tokenizer, watched):.4f}', flush=True)
    model.save_pretrained(STARTS / task)
    tokenizer.save_pretrained(STARTS / task)


@torch.no_grad()
def wait_probability(model: MiniMaxM1ForCausalLM, tokenizer: Any, problems: list[Problem]) -> float:
    """Mean probability that a response begins with the first token of "wait "."""
    first = tokenizer.encode(WAIT, add_special_tokens=False)[0]
    prompts = [tokenizer.encode(problem.prompt, add_special_tokens=False) for problem in problems]
    chances = [model(torch.tensor([prompt])).logits[0, -1].softmax(-1)[first] for prompt in prompts[:50]]
    return float(torch.stack(chances).mean())


def small_config(tokenizer: Any) -> MiniMaxM1Config:
    alpha = 4**0.25  # (2 L)^(1/4)
    return MiniMaxM1Config.tiny(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        attn_type_list=[0, 1],
        num_key_value_heads=4,
        initializer_range=0.05,
        layernorm_linear_attention_alpha=alpha,
        layernorm_full_attention_alpha=alpha,
        layernorm_mlp_alpha=alpha,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def supervised(
    model: MiniMaxM1ForCausalLM,
    tokenizer: Any,
    rng: random.Random,
    *,
    digits: int,
    steps: int,
    rate: float = 4e-3,
    says_wait: float = 0.0,
) -> Iterator[float]:
    """Steps on rows of eight problems (every fourth: of one); yields the loss of each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), eps=1e-15, weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 20)
        rows = [
            _row(tokenizer, rng, digits, 1 if step % 4 == 0 else 8, says_wait)
            for _ in range(12 if digits == 1 else 48)
        ]
        T = max(len(tokens) for tokens, _ in rows)
        tokens = torch.tensor([t + [tokenizer.pad_token_id] * (T - len(t)) for t, _ in rows])
        labels = torch.tensor([y + [-100] * (T - len(y)) for _, y in rows])
        out = model(tokens, labels=labels, use_cache=False, output_router_logits=True)
        optimizer.zero_grad()
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield out.loss.item()


def _row(
    tokenizer: Any, rng: random.Random, digits: int, count: int, says_wait: float
) -> tuple[list[int], list[int]]:
    tokens, labels = [], []
    for problem in draw(addition, rng, difficulty=digits, count=count):
        prompt = tokenizer.encode(problem.prompt, add_special_tokens=False)
        says = WAIT if rng.random() < says_wait else ""
        answer = tokenizer.encode(says + problem.answer, add_special_tokens=False) + [tokenizer.eos_token_id]
        tokens += prompt + answer
        labels += [-100] * len(prompt) + answer
    return tokens, labels


def solved(model: MiniMaxM1ForCausalLM, tokenizer: Any, problems: list[Problem]) -> float:
    sampling = SamplingParams((tokenizer.eos_token_id,), tokenizer.pad_token_id, WINDOW, greedy=True)
    prompts = [tokenizer.encode(problem.prompt, add_special_tokens=False) for problem in problems]
    responses = sample(model, prompts, sampling)
    texts = [tokenizer.decode(r.tokens.tolist(), skip_special_tokens=True) for r in responses]
    return sum(p.reward(text) for p, text in zip(problems, texts, strict=True)) / len(problems)


def run(
    task: str, name: str, seed: int, batches: int | None = None, *, start: Path | None = None
) -> list[Row]:
    """One row a batch, and one of what was dropped."""
    comparison, start = COMPARISONS[task], start or STARTS / task
    batches = batches or comparison.batches
    model = MiniMaxM1ForCausalLM.from_pretrained(start, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(start)
    with TemporaryDirectory() as folder:
        settings = TrainSettings(
            model="the start",
            output=folder,
            task=task,
            difficulty=comparison.digits,
            objective=OBJECTIVES[name],
            learning_rate=comparison.learning_rate,
            batches=batches,
            windows=(WINDOW,),
            updates=16,
            evaluate_every=1,
            evaluation_problems=200,
            save_every=1000,
            seed=seed,
        )
        trainer = Watched(model, tokenizer, comparison.task, settings)
        trainer.counts, trainer.waits = {}, []
        trainer.train()
        log = read_log(Path(folder) / "log.jsonl")
    rows = []
    for batch in range(batches):
        of = {
            kind: [x for x in log if x["kind"] == kind and x["batch"] == batch]
            for kind in ("batch", "update", "evaluation")
        }
        updates, waits = of["update"], trainer.waits[16 * batch : 16 * batch + 16]
        tokens = sum(u["tokens"] for u in updates)
        rows.append(
            {
                "task": task,
                "objective": name,
                "seed": seed,
                "batch": batch,
                "greedy": of["evaluation"][0]["greedy_accuracy"],
                "reward": of["batch"][0]["reward"],
                "seconds": round(of["batch"][0]["seconds"], 2),
                "entropy": sum(u["entropy"] * u["tokens"] for u in updates) / tokens,
                "dropped": sum(u["dropped_tokens"] for u in updates) / tokens,
                "clipped_positive": sum(u["clipped_positive"] for u in updates) / len(updates),
                "ratio_p99_last": updates[-1]["ratio_p99"],
                "ratio_largest": max(u["ratio_largest"] for u in updates),
                "waits": sum(w for w, _ in waits),
                "waits_dropped": sum(d for _, d in waits),
            }
        )
    last = [x for x in log if x["kind"] == "evaluation"][-1]
    rows.append(
        {"task": task, "objective": name, "seed": seed, "batch": batches, "greedy": last["greedy_accuracy"]}
    )
    words = tokenizer.convert_ids_to_tokens
    by_token = {
        words(token): [trainer.counts["dropped_tokens_by_id"][token], seen]
        for token, seen in trainer.counts["tokens_by_id"].most_common()
    }
    return [*rows, {"task": task, "objective": name, "seed": seed, "dropped_and_seen_by_token": by_token}]


def steps_to(rows: list[Row], value: str, target: float) -> int | None:
    """Optimiser steps until `value` first reaches the target."""
    reached = [row["batch"] for row in rows if row.get(value) is not None and row[value] >= target]
    return 16 * min(reached) if reached else None


def plot(task: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "objectives"
    import matplotlib.pyplot as plt

    rows = [row for row in read_rows(f"objectives_{task}") if "batch" in row]
    values = (COMPARISONS[task].measured, "entropy", "dropped")
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.3))
    for colour, name in zip(("tab:blue", "tab:orange", "tab:green"), OBJECTIVES, strict=True):
        for seed in sorted({row["seed"] for row in rows}):
            mine = [row for row in rows if (row["objective"], row["seed"]) == (name, seed)]
            for axis, value in zip(axes, values, strict=True):
                points = [(16 * row["batch"], row[value]) for row in mine if value in row]
                axis.plot(
                    *zip(*points, strict=True),
                    color=colour,
                    linewidth=1,
                    alpha=0.8,
                    label=name if seed == 0 else None,
                )
                axis.set_xlabel("optimiser steps")
    titles = {
        "greedy": "greedy accuracy, held out",
        "reward": "mean reward",
        "entropy": "entropy, nats",
        "dropped": "share of tokens dropped",
    }
    for axis, value in zip(axes, values, strict=True):
        axis.set_title(titles[value], fontsize=9)
    axes[0].axhline(COMPARISONS[task].target, color="0.7", linewidth=0.8, linestyle="--")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(FIGURES / f"policy_objectives_{task}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
