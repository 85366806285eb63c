"""A needle in a long input: what the one softmax layer in eight is there for.

    python -m benchmarks.run --case passkey            minutes on one core for each of three models
    python -m benchmarks.run --case passkey --quick    a few steps, prints, writes nothing

    filler ... KEY d d d d filler ... ASK d d d d          exact match of the four digits after ASK

The models differ in the kind of their layers only: seven lightning and one softmax ("hybrid"), all lightning,
all softmax. Each is trained on inputs of 32 to 256 tokens and tested from 128 on, the needle anywhere.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from minimax_hybrid.config import LIGHTNING, SOFTMAX, MiniMaxM1Config
from minimax_hybrid.cost.plotting import COLORS, picture
from minimax_hybrid.formatting import tokens
from minimax_hybrid.model import MiniMaxM1ForCausalLM

from ..harness.pages import markdown
from ..harness.plot import over_lengths
from ..harness.rows import Row, grouped, mean_over_seeds, measured

ABOUT = (
    "four digits hidden in random filler, asked for at the end: share of inputs with all four right, for "
    "models that differ only in the kinds of their eight layers (width 64, 4 heads of 32), trained on up to "
    "256 tokens"
)
TESTS = ("tests/benchmarks/test_passkey.py",)
DIGITS, KEY, ASK, FILLER, VOCABULARY = 4, 10, 11, 12, 76  # tokens 0 to 9 are the digits
LAYERS = 8
KINDS = {
    "hybrid": [LIGHTNING] * 7 + [SOFTMAX],
    "lightning": [LIGHTNING] * LAYERS,
    "softmax": [SOFTMAX] * LAYERS,
}


@dataclass(frozen=True)
class Plan:
    """How long to train and what to test; `samples` inputs per length, fewer of the longest."""

    steps: int = 1500
    batch_tokens: int = 2048
    train_lengths: tuple[int, int] = (32, 256)
    learning_rate: float = 1e-3
    test_lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    samples: int = 100
    longest_batch: int = 2**18  # tokens of one length that are tested at most


QUICK = Plan(steps=20, test_lengths=(128, 512), samples=20)


def passkey_config(kind: str) -> MiniMaxM1Config:
    return MiniMaxM1Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, rotary_dim=16, num_local_experts=4,
        max_position_embeddings=2**20, rope_theta=1e7, attn_type_list=KINDS[kind],
        **{f"layernorm_{part}_alpha": (2 * LAYERS) ** 0.25 for part in
           ("full_attention", "linear_attention", "mlp")},
    )  # fmt: skip


def needles(B: int, T: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs (B, T) that end in ASK and the first three digits, and their answers (B, DIGITS)."""
    ids = torch.randint(FILLER, VOCABULARY, (B, T), generator=rng)
    digits = torch.randint(0, 10, (B, DIGITS), generator=rng)
    # depths spread evenly over the input, so that every part of it is tested
    depth = (torch.rand(B, generator=rng) + torch.arange(B)) / B
    start = (depth[torch.randperm(B, generator=rng)] * (T - 2 * DIGITS - 1)).long()
    positions = start[:, None] + torch.arange(DIGITS + 1)
    ids.scatter_(1, positions, torch.cat([torch.full((B, 1), KEY), digits], dim=1))
    ids[:, -DIGITS] = ASK
    ids[:, T - DIGITS + 1 :] = digits[:, :-1]
    return ids, digits


def train(kind: str, plan: Plan, *, seed: int = 0) -> tuple[MiniMaxM1ForCausalLM, float]:
    """A model of one kind after `plan.steps`, and the mean loss of its last 20 steps (nats a digit)."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    model = MiniMaxM1ForCausalLM(passkey_config(kind)).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, plan.learning_rate, total_steps=plan.steps, pct_start=0.1
    )
    shortest, longest = plan.train_lengths
    losses = []
    with tqdm(range(plan.steps), desc=f"train {kind}", disable=None) as bar:
        for step in bar:
            # lengths grow to their full range over the first half
            reach = shortest + (longest - shortest) * min(1.0, 2 * (step + 1) / plan.steps)
            T = int(torch.randint(shortest, int(reach) + 1, (1,), generator=rng))
            ids, digits = needles(plan.batch_tokens // T, T, rng)
            logits = model(ids, use_cache=False, logits_to_keep=DIGITS).logits
            loss = cross_entropy(logits.flatten(0, 1), digits.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            losses.append(float(loss.detach()))
            bar.set_postfix(loss=f"{losses[-1]:.3f}", length=T)
    return model.eval(), sum(losses[-20:]) / len(losses[-20:])


@torch.inference_mode()
def accuracy(model: MiniMaxM1ForCausalLM, T: int, plan: Plan, *, seed: int = 1) -> list[float]:
    """For each input of length T, 1.0 if all digits are the most likely ones, else 0.0."""
    B = min(plan.samples, max(16, plan.longest_batch // T))
    ids, digits = needles(B, T, torch.Generator().manual_seed(seed))
    right = []
    for part in torch.arange(B).split(max(1, 16384 // T)):
        logits = model(ids[part], use_cache=False, logits_to_keep=DIGITS).logits
        right += (logits.argmax(-1) == digits[part]).all(1).double().tolist()
    return right


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=Plan.steps)


def run(options: argparse.Namespace) -> Iterator[Row]:
    torch.set_num_threads(1)
    plan = QUICK if options.quick else Plan(steps=options.steps)
    for kind in options.kinds:
        yield from train_and_test(plan, kind, seed=options.seed)


def train_and_test(plan: Plan, kind: str, *, seed: int = 0) -> Iterator[Row]:
    start = time.perf_counter()
    model, loss = train(kind, plan, seed=seed)
    seconds = time.perf_counter() - start
    print(f"{kind}: loss {loss:.3f} nats a digit after {plan.steps} steps, {seconds:.0f} s", flush=True)
    what = dict(case="passkey", side=kind, batch=1, seed=seed)
    for metric, unit, value in (("time", "s", seconds), ("loss", "nats", loss)):
        row = measured([value], **what, task="train", length=plan.train_lengths[1], metric=metric, unit=unit)
        yield replace(row, rounds=plan.steps)
    for T in plan.test_lengths:
        right = accuracy(model, T, plan)
        p, n = sum(right) / len(right), len(right)
        error = (p * (1 - p) / n) ** 0.5
        row = measured([p], **what, task="recall", length=T, metric="accuracy", unit="share")
        yield replace(row, p20=p - error, p80=p + error, rounds=n)
        print(f"{kind:10} {T:>6,} tokens: {p:.0%} of {n}", flush=True)


def table(rows: list[Row]) -> str:
    """Needles found, one line for each length, the mean over a side's seeds."""
    sides = list(dict.fromkeys(row.side for row in rows))
    of = {metric: mean_over_seeds(group) for (metric,), group in grouped(rows, "metric").items()}
    found = {(row.side, row.length): f"{row.p50:.0%} of {row.rounds}" for row in of["accuracy"]}
    losses, times = ({row.side: row for row in of[metric]} for metric in ("loss", "time"))
    models = Counter(row.side for row in rows if row.metric == "loss")
    lines = [
        [tokens(T), rows[0].dtype, *(found.get((side, T), "-") for side in sides)]
        for T in sorted({length for _, length in found})
    ]
    lines.append(["models trained", "", *(str(models[side]) for side in sides)])
    lines.append(["training loss, nats a digit", "", *(f"{losses[side].p50:.3f}" for side in sides)])
    lines.append(["training steps", "", *(f"{losses[side].rounds // models[side]:,}" for side in sides)])
    lines.append(["training, one core", "", *(f"{times[side].p50:.0f} s" for side in sides)])
    return markdown(["input, tokens", "type", *sides], lines)


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """Share of needles found against the length of the input; the mean over seeds where there are several."""
    path = folder / "passkey.svg"
    labels = {"hybrid": "7 lightning + 1 softmax", "lightning": "8 lightning", "softmax": "8 softmax"}
    of = grouped(rows, "metric")
    with picture(path) as (axis,):
        over_lengths(axis, mean_over_seeds(of["accuracy",]), scale=100.0, labels=labels)
        longest, color = of["loss",][0].length, COLORS["other"]
        axis.axvline(longest, color=color, lw=0.8, ls=":")
        axis.annotate(" trained up to here", (longest, 3), color=color, fontsize=8.5)
        axis.set(title="needles found, %", ylim=(-4, 104), xlabel="input, tokens")
        axis.legend(loc="upper right")
    return [path]
