"""A needle in a long input: what the one softmax layer in eight is there for.

    python -m benchmarks.passkey            trains three models on one core, minutes each, and tests them
    python -m benchmarks.passkey --quick    a few steps, prints, writes nothing

    filler ... KEY d d d d filler ... ASK d d d d          exact match of the four digits after ASK

The models differ in the kind of their layers only: seven lightning and one softmax ("hybrid"), all lightning,
all softmax. Each is trained on inputs of 32 to 256 tokens and tested from 128 on, the needle anywhere.
"""

import argparse
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from minimax_hybrid.config import LIGHTNING, SOFTMAX, MiniMaxM1Config
from minimax_hybrid.model import MiniMaxM1ForCausalLM

from .measure import device_slug, place, require
from .rows import RESULTS, Row, append
from .tables import write_pages

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
    place_ = start[:, None] + torch.arange(DIGITS + 1)
    ids.scatter_(1, place_, torch.cat([torch.full((B, 1), KEY), digits], dim=1))
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
    for rows in torch.arange(B).split(max(1, 16384 // T)):
        logits = model(ids[rows], use_cache=False, logits_to_keep=DIGITS).logits
        right += (logits.argmax(-1) == digits[rows]).all(1).double().tolist()
    return right


def run(plan: Plan, kind: str, *, seed: int = 0) -> list[Row]:
    """Train and test one model."""
    where, rows = place(), []

    def row(task: str, metric: str, unit: str, *, length: int, value: float, error: float, rounds: int):
        spread = dict(p20=value - error, p50=value, p80=value + error, rounds=rounds)
        shape = dict(task=f"{task}, seed {seed}", length=length, batch=1, dtype="float32")
        rows.append(Row("passkey", kind, **shape, metric=metric, unit=unit, **spread, **where))

    start = time.perf_counter()
    model, loss = train(kind, plan, seed=seed)
    seconds = time.perf_counter() - start
    longest = plan.train_lengths[1]
    row("train", "time", "s", length=longest, value=seconds, error=0.0, rounds=plan.steps)
    row("train", "loss", "nats", length=longest, value=loss, error=0.0, rounds=plan.steps)
    print(f"{kind}: loss {loss:.3f} nats a digit after {plan.steps} steps, {seconds:.0f} s", flush=True)
    for T in plan.test_lengths:
        right = accuracy(model, T, plan)
        p, n = sum(right) / len(right), len(right)
        row("recall", "accuracy", "share", length=T, value=p, error=(p * (1 - p) / n) ** 0.5, rounds=n)
        print(f"{kind:10} {T:>6,} tokens: {p:.0%} of {n}", flush=True)
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.passkey", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=Plan.steps)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    require("passkey", "tests/test_benchmarks.py", "-k", "needle or passkey or accuracy")
    plan = QUICK if args.quick else Plan(steps=args.steps)
    for kind in args.kinds:
        rows = run(plan, kind, seed=args.seed)
        if not args.quick:
            append(RESULTS / f"{device_slug()}.csv", rows)
            write_pages()


if __name__ == "__main__":
    main()
