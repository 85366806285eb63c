"""CISPO, DAPO and GRPO on the same problems, 16 updates a batch, three seeds each: who learns in fewer steps.

    python -m benchmarks.run --case policy_objectives --start recheck    trains the start of its runs
    python -m benchmarks.run --case policy_objectives --task recheck     one digit; a rare first token pays
    python -m benchmarks.run --case policy_objectives --task addition    two digits; the start solves some

In `addition` the start is the demo, its training stopped far earlier. In `recheck` it is a model of two
layers, one lightning and one softmax; a right sum earns 0.2, and 1 if "wait " comes before it, which the
start says in one of two hundred responses: a trust region may drop that token, which CISPO's bound cannot.
"""

import argparse
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from minimax_hybrid import MiniMaxM1Config, MiniMaxM1ForCausalLM
from minimax_hybrid.cost.plotting import INK, picture
from minimax_hybrid.rl.objective import CISPO, DAPO, GRPO
from minimax_hybrid.rl.rollout import SamplingParams, sample
from minimax_hybrid.rl.run_folder import read_log
from minimax_hybrid.rl.settings import TrainSettings
from minimax_hybrid.rl.tasks import Problem, addition
from minimax_hybrid.rl.tasks import draw as draw_problems
from minimax_hybrid.rl.trainer import Trainer
from minimax_hybrid.text import DEMO

from ..harness.measure import Stopped, each
from ..harness.pages import markdown
from ..harness.plot import over_batches
from ..harness.rows import ROOT, Row, measured

ABOUT = (
    "CISPO, DAPO and GRPO on the same problems, 16 updates a batch, three seeds each: who learns in fewer "
    "steps, and which tokens are dropped"
)
TESTS = ("tests/benchmarks/test_policy.py", "-k", "objectives or wait")

OBJECTIVES = {"cispo": CISPO(ratio_max=5.0), "dapo": DAPO(), "grpo": GRPO()}
WAIT = "wait "
WINDOW = 10
STARTS = Path("runs/objectives")
SUPERVISED = ROOT / "scripts" / "train_demo.py"
UPDATES = 16


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

    counts: dict[str, Counter]
    waits: list[tuple[int, int]]

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


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--start", choices=COMPARISONS, help="only train the start of this task's runs")
    parser.add_argument("--task", choices=COMPARISONS, default="recheck")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batches", type=int, default=None, help="instead of what the task has")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time, of one thread each")


def run(options: argparse.Namespace) -> Iterator[Row]:
    torch.set_num_threads(1)
    if options.start:
        train_start(options.start)
        raise Stopped(f"the start is in {STARTS / options.start}")
    batches, words = 1 if options.quick else options.batches, options.words
    jobs = [(options.task, name, seed, batches, None, words) for seed in options.seeds for name in OBJECTIVES]
    yield from each(train, jobs, processes=options.processes)


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
    watched = draw_problems(addition, random.Random(1), difficulty=digits, count=200)
    for step, loss in enumerate(supervised(model, tokenizer, random.Random(0), digits=digits, steps=100_000)):
        if step % 50 == 49:
            accuracy = solved(model, tokenizer, watched)
            print(f"step {step + 1}: loss {loss:.3f}, greedy {accuracy:.3f}", flush=True)
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
    """Steps on sequences of eight problems (every fourth: of one); yields the loss of each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), eps=1e-15, weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 20)
        batch = [
            _sequence(tokenizer, rng, digits, 1 if step % 4 == 0 else 8, says_wait)
            for _ in range(12 if digits == 1 else 48)
        ]
        T = max(len(tokens) for tokens, _ in batch)
        tokens = torch.tensor([t + [tokenizer.pad_token_id] * (T - len(t)) for t, _ in batch])
        labels = torch.tensor([y + [-100] * (T - len(y)) for _, y in batch])
        out = model(tokens, labels=labels, use_cache=False, output_router_logits=True)
        optimizer.zero_grad()
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield out.loss.item()


def _sequence(
    tokenizer: Any, rng: random.Random, digits: int, count: int, says_wait: float
) -> tuple[list[int], list[int]]:
    tokens, labels = [], []
    for problem in draw_problems(addition, rng, difficulty=digits, count=count):
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


def train(
    task: str, name: str, seed: int, batches: int | None = None, start: Path | None = None, words: str = ""
) -> list[Row]:
    """One run: curves over batches, and how often each token was dropped and trained on."""
    comparison, start = COMPARISONS[task], start or STARTS / task
    batches = batches or comparison.batches
    model = MiniMaxM1ForCausalLM.from_pretrained(start, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(start)
    with TemporaryDirectory() as folder:
        settings = TrainSettings(
            model="the start", output=folder, task=task, difficulty=comparison.digits,
            objective=OBJECTIVES[name], learning_rate=comparison.learning_rate, batches=batches,
            windows=(WINDOW,),
            updates=UPDATES, evaluate_every=1, evaluation_problems=200, save_every=1000, seed=seed,
        )  # fmt: skip
        trainer = Watched(model, tokenizer, comparison.task, settings)
        trainer.counts, trainer.waits = {}, []
        trainer.train()
        log = read_log(Path(folder) / "log.jsonl")
    what = dict(case="policy_objectives", side=name, task=task, seed=seed, options=words)
    found = [
        measured(values, at=range(len(values)), **what, metric=metric, unit=UNITS.get(metric, "1"))
        for metric, values in curves(log, trainer.waits, batches).items()
    ]
    seen = trainer.counts["tokens_by_id"].most_common()
    tokens = tokenizer.convert_ids_to_tokens([token for token, _ in seen])
    dropped = [trainer.counts["dropped_tokens_by_id"][token] for token, _ in seen]
    found.append(measured(dropped, at=tokens, **what, metric="tokens dropped", unit="tokens"))
    found.append(measured([n for _, n in seen], at=tokens, **what, metric="tokens seen", unit="tokens"))
    return found


UNITS = {"greedy": "share", "seconds": "s", "entropy": "nats", "dropped": "share", "waits": "tokens",
         "waits_dropped": "tokens"}  # fmt: skip


def curves(log: list[dict[str, Any]], waits: list[tuple[int, int]], batches: int) -> dict[str, list[float]]:
    """One number a batch; of greedy accuracy one more, after the last."""
    found: dict[str, list[float]] = {}
    for batch in range(batches):
        lines = [line for line in log if line["batch"] == batch]
        of = {kind: [line for line in lines if line["kind"] == kind] for kind in ("batch", "update")}
        updates, said = of["update"], waits[UPDATES * batch : UPDATES * (batch + 1)]
        tokens = sum(u["tokens"] for u in updates)
        numbers = {
            "reward": of["batch"][0]["reward"],
            "seconds": round(of["batch"][0]["seconds"], 2),
            "entropy": sum(u["entropy"] * u["tokens"] for u in updates) / tokens,
            "dropped": sum(u["dropped_tokens"] for u in updates) / tokens,
            "clipped_positive": sum(u["clipped_positive"] for u in updates) / len(updates),
            "ratio_p99_last": updates[-1]["ratio_p99"],
            "ratio_largest": max(u["ratio_largest"] for u in updates),
            "waits": sum(w for w, _ in said),
            "waits_dropped": sum(d for _, d in said),
        }
        for name, value in numbers.items():
            found.setdefault(name, []).append(value)
    return found | {"greedy": [x["greedy_accuracy"] for x in log if x["kind"] == "evaluation"]}


def steps_to(values: tuple[float, ...], target: float) -> str:
    """Optimiser steps until a curve first reaches the target."""
    return next((str(UPDATES * i) for i, value in enumerate(values) if value >= target), "not reached")


def table(rows: list[Row]) -> str:
    return "\n\n".join(text for _, text in tables(rows).values())


def tables(rows: list[Row]) -> dict[str, tuple[list[Row], str]]:
    """For each task that was run: how fast it was learned, and what was dropped."""
    found = {}
    for task in COMPARISONS:
        if of := [row for row in rows if row.task == task]:
            found[task] = of, learned(of, task)
            found[f"{task}_dropped"] = of, dropped(of)
    return found


def learned(rows: list[Row], task: str) -> str:
    value, target = COMPARISONS[task].measured, COMPARISONS[task].target
    lines = []
    for name in OBJECTIVES:
        of: dict[str, list[tuple[float, ...]]] = {}
        for row in sorted((row for row in rows if row.side == name), key=lambda row: row.seed):
            of.setdefault(row.metric, []).append(row.values)
        if not of:
            continue
        cells = [
            name,
            ", ".join(steps_to(curve, target) for curve in of[value]),
            ", ".join(f"{curve[-1]:.2f}" for curve in of[value]),
            f"{mean(x for curve in of['dropped'] for x in curve):.4f}",
            f"{mean(curve[-1] for curve in of['entropy']):.3f}",
        ]
        if task == "recheck":
            said = sum(map(sum, of["waits"]))
            cells.append(f"{sum(map(sum, of['waits_dropped'])) / max(1, said):.4f}")
            cells.insert(2, ", ".join(steps_to(curve, 128) for curve in of["waits"]))
        lines.append(cells)
    head = ["", f"steps to {value} {target}", f"last {value}", "tokens dropped", "last entropy"]
    if task == "recheck":
        head = [*head[:2], 'steps to "wait" in half', *head[2:], '`w` of "wait" dropped']
    return markdown(head, lines, text=1)


def dropped(rows: list[Row]) -> str:
    """The ten tokens with the largest share dropped, of those at least a thousandth of all tokens."""
    lines = []
    for name in OBJECTIVES:
        totals = {"tokens dropped": Counter(), "tokens seen": Counter()}
        for row in rows:
            if row.side == name and row.metric in totals:
                totals[row.metric].update(dict(zip(row.at, row.values, strict=True)))
        gone, seen = totals.values()
        common = {token: gone[token] / n for token, n in seen.items() if n > sum(seen.values()) / 1000}
        worst = sorted(common, key=lambda token: common[token], reverse=True)[:10]
        listed = ", ".join(f"`{token}` {100 * common[token]:.1f} %" for token in worst if common[token] > 0)
        lines.append([name, listed or "none"])
    return markdown(["", "tokens most often dropped"], lines)


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """A picture for each task: what is waited for, entropy, and the share of tokens dropped."""
    titles = {"greedy": "greedy accuracy, held out", "reward": "mean reward", "entropy": "entropy, nats",
              "dropped": "share of tokens dropped"}  # fmt: skip
    drawn = []
    for task, comparison in COMPARISONS.items():
        if not any(row.task == task for row in rows):
            continue
        drawn.append(folder / f"policy_objectives_{task}.svg")
        with picture(drawn[-1], panels=3) as axes:
            for axis, metric in zip(axes, (comparison.measured, "entropy", "dropped"), strict=True):
                for name, color in zip(OBJECTIVES, ("hybrid", "softmax", "lightning"), strict=True):
                    of = [row for row in rows if (row.task, row.side, row.metric) == (task, name, metric)]
                    over_batches(axis, of, color=color, label=name, scale=UPDATES)
                axis.set_title(titles[metric])
                axis.set_xlabel("optimiser steps")
            axes[0].axhline(comparison.target, color=INK, lw=0.8, ls="--")
            axes[0].legend()
    return drawn
