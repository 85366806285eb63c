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
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minimax_hybrid import MiniMaxM1Config, MiniMaxM1ForCausalLM
from minimax_hybrid.cost.plotting import INK, picture
from minimax_hybrid.rl.objective import CISPO, DAPO, GRPO
from minimax_hybrid.rl.rollout import SamplingParams, sample
from minimax_hybrid.rl.settings import TrainSettings
from minimax_hybrid.rl.tasks import Problem, addition
from minimax_hybrid.rl.tasks import draw as draw_problems
from minimax_hybrid.rl.trainer import Trainer
from minimax_hybrid.text import DEMO, load_tokenizer
from minimax_kernels import IGNORED

from ..harness import policy
from ..harness.measure import Stopped, each
from ..harness.pages import markdown
from ..harness.plot import over_batches
from ..harness.rows import ROOT, Row, grouped, measured

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

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self.seen: Counter[int] = Counter()
        self.dropped: Counter[int] = Counter()
        self.waits: list[tuple[int, int]] = []  # of each update: first tokens of WAIT, and those dropped

    def log_update(self, update: int, loss: float, norm: float, scored: dict[str, Tensor]) -> None:
        super().log_update(update, loss, norm, scored)
        objective, token, A = self.settings.objective, scored["token"], scored["advantage"]
        r = (scored["log_prob"] - scored["old_log_prob"]).exp()
        dropped = ((A > 0) & (r > objective.trust_max)) | ((A < 0) & (r < objective.trust_min))
        self.seen.update(token.tolist())
        self.dropped.update(token[dropped].tolist())
        first = token == ids_of(self.tokenizer, WAIT)[0]
        self.waits.append((int(first.sum()), int((first & dropped).sum())))


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--start", choices=COMPARISONS, help="only train the start of this task's runs")
    parser.add_argument("--task", choices=COMPARISONS, default="recheck")
    parser.add_argument("--batches", type=int, default=None, help="instead of what the task has")
    policy.options(parser)


def run(options: argparse.Namespace) -> Iterator[Row]:
    if options.start:
        torch.set_num_threads(1)
        train_start(options.start)
        raise Stopped(f"the start is in {STARTS / options.start}")
    batches = 1 if options.quick else options.batches
    jobs = [(options.task, name, seed, batches) for seed in options.seeds for name in OBJECTIVES]
    yield from each(train, jobs, processes=options.processes)


def train_start(task: str) -> None:
    """A model from nothing, by supervised learning, until it solves as much as it should."""
    comparison = COMPARISONS[task]
    if task == "addition":
        command = [sys.executable, SUPERVISED, "--stop-at", str(comparison.start_at), "--out", STARTS / task]
        subprocess.run(command, check=True)
        return
    torch.manual_seed(0)
    tokenizer, digits = load_tokenizer(DEMO), comparison.digits
    model = MiniMaxM1ForCausalLM(small_config(tokenizer))
    watched = draw_problems(addition, random.Random(1), difficulty=digits, count=200)
    for step, loss in enumerate(supervised(model, tokenizer, random.Random(0), digits=digits, steps=100_000)):
        if step % 50 == 49:
            accuracy = solved(model, tokenizer, watched)
            print(f"step {step + 1}: loss {loss:.3f}, greedy {accuracy:.3f}", flush=True)
            if accuracy >= comparison.start_at:
                break
    slowly = dict(digits=digits, steps=100, rate=1e-3)
    for share in (0.5, 0.02):  # first how to say it, then how seldom
        *_, loss = supervised(model, tokenizer, random.Random(1), **slowly, says_wait=share)
        print(f"loss {loss:.3f}", flush=True)
    print(f'says "wait" with probability {wait_probability(model, tokenizer, watched):.4f}', flush=True)
    model.save_pretrained(STARTS / task)
    tokenizer.save_pretrained(STARTS / task)


@torch.no_grad()
def wait_probability(model: MiniMaxM1ForCausalLM, tokenizer: Any, problems: list[Problem]) -> float:
    """Mean probability that a response begins with the first token of "wait "."""
    first = ids_of(tokenizer, WAIT)[0]
    prompts = [torch.tensor([ids_of(tokenizer, problem.prompt)]) for problem in problems[:50]]
    return mean(float(model(prompt).logits[0, -1].softmax(-1)[first]) for prompt in prompts)


def small_config(tokenizer: Any) -> MiniMaxM1Config:
    deepnorm = {f"layernorm_{part}_alpha": 4**0.25 for part in ("linear_attention", "full_attention", "mlp")}
    return MiniMaxM1Config.tiny(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        attn_type_list=[0, 1], num_key_value_heads=4, initializer_range=0.05, **deepnorm,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip


def supervised(
    model: MiniMaxM1ForCausalLM, tokenizer: Any, rng: random.Random, *, digits: int, steps: int,
    rate: float = 4e-3, says_wait: float = 0.0,
) -> Iterator[float]:  # fmt: skip
    """Steps on sequences of eight problems (every fourth: of one); yields the loss of each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), eps=1e-15, weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 20)
        problems, sequences = 1 if step % 4 == 0 else 8, 12 if digits == 1 else 48
        lessons = [_lesson(tokenizer, rng, digits, problems, says_wait) for _ in range(sequences)]
        tokens, labels = (
            pad_sequence([lesson[side] for lesson in lessons], batch_first=True, padding_value=fill)
            for side, fill in enumerate((tokenizer.pad_token_id, IGNORED))
        )
        out = model(tokens, labels=labels, use_cache=False, output_router_logits=True)
        optimizer.zero_grad()
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield out.loss.item()


def _lesson(
    tokenizer: Any, rng: random.Random, digits: int, count: int, says_wait: float
) -> tuple[Tensor, Tensor]:
    """Tokens and labels of problems and their answers, of which the answers are to be learnt."""
    tokens, labels = [], []
    for problem in draw_problems(addition, rng, difficulty=digits, count=count):
        prompt, says = ids_of(tokenizer, problem.prompt), WAIT if rng.random() < says_wait else ""
        answer = ids_of(tokenizer, says + problem.answer) + [tokenizer.eos_token_id]
        tokens += prompt + answer
        labels += [IGNORED] * len(prompt) + answer
    return torch.tensor(tokens), torch.tensor(labels)


def solved(model: MiniMaxM1ForCausalLM, tokenizer: Any, problems: list[Problem]) -> float:
    sampling = SamplingParams((tokenizer.eos_token_id,), tokenizer.pad_token_id, WINDOW, greedy=True)
    responses = sample(model, [ids_of(tokenizer, problem.prompt) for problem in problems], sampling)
    texts = [tokenizer.decode(r.tokens.tolist(), skip_special_tokens=True) for r in responses]
    return mean(p.reward(text) for p, text in zip(problems, texts, strict=True))


def train(
    task: str, name: str, seed: int, batches: int | None = None, start: Path | None = None
) -> list[Row]:
    """One run: curves over batches, and how often each token was dropped and trained on."""
    comparison, start = COMPARISONS[task], start or STARTS / task
    settings = TrainSettings(
        model="the start", output="", task=task, difficulty=comparison.digits, objective=OBJECTIVES[name],
        learning_rate=comparison.learning_rate, batches=batches or comparison.batches, windows=(WINDOW,),
        updates=UPDATES, evaluate_every=1, evaluation_problems=200, seed=seed,
    )  # fmt: skip
    trainer, log = policy.trained(start, settings, task=comparison.task, trainer=Watched)
    what = dict(case="policy_objectives", side=name, task=task, seed=seed)
    found = list(policy.curve_rows(curves(log, trainer.waits), **what))
    tokens = [token for token, _ in trainer.seen.most_common()]
    texts = trainer.tokenizer.convert_ids_to_tokens(tokens)
    for metric, counts in (("tokens dropped", trainer.dropped), ("tokens seen", trainer.seen)):
        numbers = [counts[token] for token in tokens]
        found.append(measured(numbers, at=texts, **what, metric=metric, unit="tokens"))
    return found


def curves(log: list[dict[str, Any]], waits: list[tuple[int, int]]) -> dict[str, dict[int, float]]:
    """What is kept of a run's log, by batch; of greedy accuracy one more, after the last."""
    found: dict[str, dict[int, float]] = {"greedy": {}}
    for line in log:
        batch = line["batch"]
        if line["kind"] == "evaluation":
            found["greedy"][batch] = line["greedy_accuracy"]
        if line["kind"] != "batch":
            continue
        updates = [u for u in log if (u["kind"], u["batch"]) == ("update", batch)]
        said, gone = map(sum, zip(*waits[UPDATES * batch : UPDATES * (batch + 1)], strict=True))
        tokens = sum(u["tokens"] for u in updates)
        numbers = {
            "reward": line["reward"],
            "seconds": round(line["seconds"], 2),
            "entropy": sum(u["entropy"] * u["tokens"] for u in updates) / tokens,
            "dropped": sum(u["dropped_tokens"] for u in updates) / tokens,
            "clipped_positive": mean(u["clipped_positive"] for u in updates),
            "ratio_p99_last": updates[-1]["ratio_p99"],
            "ratio_largest": max(u["ratio_largest"] for u in updates),
            "waits": said,
            "waits_dropped": gone,
        }
        for metric, value in numbers.items():
            found.setdefault(metric, {})[batch] = value
    return found


def steps_to(values: tuple[float, ...], target: float) -> str:
    """Optimiser steps until a curve first reaches the target."""
    return next((str(UPDATES * i) for i, value in enumerate(values) if value >= target), "not reached")


def table(rows: list[Row]) -> str:
    return "\n\n".join(text for _, text in tables(rows).values())


def tables(rows: list[Row]) -> dict[str, tuple[list[Row], str]]:
    """For each task that was run: how fast it was learned, and what was dropped."""
    found = {}
    for (task,), of in sorted(grouped(rows, "task").items()):
        found[task] = of, learned(of, task)
        found[f"{task}_dropped"] = of, dropped(of)
    return found


def learned(rows: list[Row], task: str) -> str:
    value, target = COMPARISONS[task].measured, COMPARISONS[task].target
    head = ["", f"steps to {value} {target}", f"last {value}", "tokens dropped", "last entropy"]
    lines = []
    for (name,), of in sorted(grouped(rows, "side").items()):
        of = sorted(of, key=lambda row: row.seed)
        curves = {metric: [row.values for row in group] for (metric,), group in grouped(of, "metric").items()}
        cells = [
            name,
            ", ".join(steps_to(curve, target) for curve in curves[value]),
            ", ".join(f"{curve[-1]:.2f}" for curve in curves[value]),
            f"{mean(x for curve in curves['dropped'] for x in curve):.4f}",
            f"{mean(curve[-1] for curve in curves['entropy']):.3f}",
        ]
        if task == "recheck":
            said, gone = (sum(map(sum, curves[metric])) for metric in ("waits", "waits_dropped"))
            cells.append(f"{gone / max(1, said):.4f}")
            cells.insert(2, ", ".join(steps_to(curve, 128) for curve in curves["waits"]))
        lines.append(cells)
    if task == "recheck":
        head = [*head[:2], 'steps to "wait" in half', *head[2:], '`w` of "wait" dropped']
    return markdown(head, lines, text=1)


def dropped(rows: list[Row]) -> str:
    """The ten tokens with the largest share dropped, of those at least a thousandth of all tokens."""
    lines = []
    for (name,), of in sorted(grouped(rows, "side").items()):
        totals = {"tokens dropped": Counter(), "tokens seen": Counter()}
        for row in of:
            if row.metric in totals:
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
    colors = dict(zip(OBJECTIVES, ("hybrid", "softmax", "lightning"), strict=True))
    drawn = []
    for (task,), of in sorted(grouped(rows, "task").items()):
        drawn.append(folder / f"policy_objectives_{task}.svg")
        curves, waited_for = grouped(of, "metric", "side"), COMPARISONS[task].measured
        with picture(drawn[-1], panels=3) as axes:
            for axis, metric in zip(axes, (waited_for, "entropy", "dropped"), strict=True):
                for name, color in colors.items():
                    over_batches(axis, curves[metric, name], color=color, label=name, scale=UPDATES)
                axis.set(title=titles[metric], xlabel="optimiser steps")
            axes[0].axhline(COMPARISONS[task].target, color=INK, lw=0.8, ls="--")
            axes[0].legend()
    return drawn
