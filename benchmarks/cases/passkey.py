"""A needle in a long input: what the one softmax layer in eight is there for.

    python -m benchmarks.run --case passkey            minutes on one core for each of three models
    python -m benchmarks.run --case passkey --quick    a few steps, prints, writes nothing

    filler ... KEY d d d d filler ... ASK d d d d          exact match of the four digits after ASK

The models differ in the kind of their layers only: seven lightning and one softmax ("hybrid"), all lightning,
all softmax. Each is trained on inputs of 32 to 256 tokens and tested from 128 on, the needle anywhere.
"""

import argparse
import time
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
from ..harness.rows import Row, mean_over_seeds, measured

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
    def row(
        task: str, metric: str, unit: str, *, length: int, value: float, error: float, rounds: int
    ) -> Row:
        what = dict(case="passkey", side=kind, task=task, length=length, batch=1, seed=seed)
        one = measured([value], **what, metric=metric, unit=unit)
        return replace(one, p20=value - error, p80=value + error, rounds=rounds)

    start = time.perf_counter()
    model, loss = train(kind, plan, seed=seed)
    seconds = time.perf_counter() - start
    longest = plan.train_lengths[1]
    yield row("train", "time", "s", length=longest, value=seconds, error=0.0, rounds=plan.steps)
    yield row("train", "loss", "nats", length=longest, value=loss, error=0.0, rounds=plan.steps)
    print(f"{kind}: loss {loss:.3f} nats a digit after {plan.steps} steps, {seconds:.0f} s", flush=True)
    for T in plan.test_lengths:
        right = accuracy(model, T, plan)
        p, n = sum(right) / len(right), len(right)
        yield row("recall", "accuracy", "share", length=T, value=p, error=(p * (1 - p) / n) ** 0.5, rounds=n)
        print(f"{kind:10} {T:>6,} tokens: {p:.0%} of {n}", flush=True)


def table(rows: list[Row]) -> str:
    """Needles found, one line for each length, the mean over a side's seeds."""
    sides = list(dict.fromkeys(row.side for row in rows))
    trained = [row for row in rows if row.metric == "loss"]
    seeds = {side: len({row.seed for row in trained if row.side == side}) for side in sides}
    means = mean_over_seeds([row for row in rows if row.metric == "accuracy"])
    found = {(row.side, row.length): f"{row.p50:.0%} of {row.rounds}" for row in means}
    lines = [
        [tokens(T), rows[0].dtype, *(found.get((side, T), "-") for side in sides)]
        for T in sorted({length for _, length in found})
    ]
    losses = {row.side: row for row in mean_over_seeds(trained)}
    times = {row.side: row for row in mean_over_seeds([row for row in rows if row.metric == "time"])}
    lines.append(["models trained", "", *(str(seeds[side]) for side in sides)])
    lines.append(["training loss, nats a digit", "", *(f"{losses[side].p50:.3f}" for side in sides)])
    lines.append(["training steps", "", *(f"{losses[side].rounds // seeds[side]:,}" for side in sides)])
    lines.append(["training, one core", "", *(f"{times[side].p50:.0f} s" for side in sides)])
    return markdown(["input, tokens", "type", *sides], lines)


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """Share of needles found against the length of the input; the mean over seeds where there are several."""
    path = folder / "passkey.svg"
    trained = [row for row in rows if row.task == "train"]
    labels = {"hybrid": "7 lightning + 1 softmax", "lightning": "8 lightning", "softmax": "8 softmax"}
    with picture(path) as (axis,):
        found = mean_over_seeds([row for row in rows if row.metric == "accuracy"])
        over_lengths(axis, found, scale=100.0, labels=labels)
        if trained:
            axis.axvline(trained[0].length, color=COLORS["other"], lw=0.8, ls=":")
            axis.annotate(" trained up to here", (trained[0].length, 3), color=COLORS["other"], fontsize=8.5)
        axis.set_title("needles found, %")
        axis.set_ylim(-4, 104)
        axis.set_xlabel("input, tokens")
        axis.legend(loc="upper right")
    return [path]
