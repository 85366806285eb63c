"""Trains the bundled demo checkpoint from nothing, on a CPU: pretraining on text written by templates, then a
cold start on additions.

    python scripts/train_demo.py --out minimax_hybrid/demo     what the repository ships
    python scripts/train_demo.py --quick --out /tmp/demo       seconds; shows that it learns

The cold start ends as soon as greedy accuracy on additions passes `--stop-at`: reinforcement learning is to
have something left to gain. Problems held out by `minimax_hybrid.rl.tasks` serve the last measurement only.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from demo_corpus import build_tokenizer, chat, document, training_addition, worked
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from minimax_hybrid import MiniMaxM1Config, MiniMaxM1ForCausalLM
from minimax_hybrid.rl.tasks import Problem, addition, draw
from minimax_kernels import IGNORED

DIGITS = 2  # the difficulty that the card reports


@dataclass(frozen=True)
class Stage:
    """One part of the training.

    Args:
        texts: documents and chats in a batch.
        additions: additions in a batch.
        warmup: steps in which the learning rate rises to `peak`; it then falls along a cosine to `final`.
    """

    name: str
    steps: int
    texts: int
    additions: int
    warmup: int
    peak: float
    final: float

    def learning_rate(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.final + (self.peak - self.final) * 0.5 * (1 + math.cos(math.pi * done))


PRETRAINING = Stage("pretraining", 300, texts=12, additions=64, warmup=40, peak=3e-3, final=3e-3)
COLD_START = Stage("cold start", 1000, texts=4, additions=64, warmup=1, peak=3e-3, final=2e-4)


def demo_config(tokenizer: PreTrainedTokenizerFast) -> MiniMaxM1Config:
    """Seven lightning layers and a softmax layer, 2.2 million parameters."""
    return MiniMaxM1Config.tiny(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        router_aux_loss_coef=0.01,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


class Corpus:
    """Batches (tokens, labels), both (B, T): padded on the right, where causality makes a mask needless."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int):
        self.tokenizer, self.rng = tokenizer, random.Random(seed)
        self.pool: list[list[int]] = []

    def texts(self, count: int) -> tuple[Tensor, Tensor]:
        """Texts of similar length, every token to be learnt."""
        if len(self.pool) < count:
            drawn = sorted((self._text() for _ in range(16 * count)), key=len)
            batches = [drawn[i : i + count] for i in range(0, len(drawn), count)]
            self.rng.shuffle(batches)
            self.pool = [row for batch in batches for row in batch]
        rows = [self.pool.pop() for _ in range(count)]
        return self._padded(rows, rows)

    def additions(self, count: int) -> tuple[Tensor, Tensor]:
        """Rows `12+34=[64]46<eos>`; only the answers are to be learnt, the summands are chance."""
        rows, labels = [], []
        for _ in range(count):
            problem = training_addition(self.rng, self.rng.choice((1, 2, 2, 2)))
            prompt, answer = self._ids(problem.prompt), self._ids(worked(problem), end=True)
            rows.append(prompt + answer)
            labels.append([IGNORED] * len(prompt) + answer)
        return self._padded(rows, labels)

    def _text(self) -> list[int]:
        if self.rng.random() < 0.25:
            return self._ids(self.tokenizer.apply_chat_template(chat(self.rng), tokenize=False))
        start = self.tokenizer.bos_token if self.rng.random() < 0.2 else ""
        return self._ids(start + document(self.rng), end=True)

    def _ids(self, text: str, *, end: bool = False) -> list[int]:
        return self.tokenizer(text).input_ids + [self.tokenizer.eos_token_id] * end

    def _padded(self, rows: list[list[int]], labels: list[list[int]]) -> tuple[Tensor, Tensor]:
        T = max(map(len, rows))
        fill = self.tokenizer.pad_token_id
        tokens = torch.tensor([row + [fill] * (T - len(row)) for row in rows])  # (B, T)
        return tokens, torch.tensor([row + [IGNORED] * (T - len(row)) for row in labels])


def train(model: MiniMaxM1ForCausalLM, corpus: Corpus, stage: Stage) -> Iterator[dict[str, float]]:
    """Takes one step after another; yields what happened in each."""
    optimizer = torch.optim.AdamW(_groups(model), lr=stage.peak, betas=(0.9, 0.95))
    for step in range(stage.steps):
        for group in optimizer.param_groups:
            group["lr"] = stage.learning_rate(step)
        record = {"step": step + 1}
        batches = {
            "text": corpus.texts(stage.texts),
            "addition": corpus.additions(stage.additions),
        }
        for name, (tokens, labels) in batches.items():
            out = model(tokens, labels=labels, use_cache=False, output_router_logits=True)
            out.loss.backward()
            record[name] = (out.loss - model.config.router_aux_loss_coef * out.aux_loss).item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
        yield record | {"gradient": norm.item()}


def _groups(model: MiniMaxM1ForCausalLM) -> list[dict]:
    """Weight decay for matrices; none for norms, nor for embeddings, of which no row may fade to zero."""
    kept = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed_tokens" in n]
    decayed = [p for n, p in model.named_parameters() if p.ndim >= 2 and "embed_tokens" not in n]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}]


@torch.no_grad()
def accuracy(
    model: MiniMaxM1ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    *,
    sampled: bool = False,
) -> float:
    """Share of problems answered exactly, with the likeliest tokens or drawn at temperature 1."""
    was_training, right = model.training, 0.0
    choice = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0) if sampled else dict(do_sample=False)
    model.eval()
    for first in range(0, len(problems), 250):
        part = problems[first : first + 250]
        prompts = tokenizer([problem.prompt for problem in part], padding=True, return_tensors="pt")
        tokens = model.generate(**prompts, **choice, max_new_tokens=2 * DIGITS + 5)
        answers = tokenizer.batch_decode(tokens[:, prompts.input_ids.shape[1] :], skip_special_tokens=True)
        right += sum(problem.reward(answer) for problem, answer in zip(part, answers, strict=True))
    model.train(was_training)
    return right / len(problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop-at", type=float, default=0.76, help="accuracy that ends the cold start")
    parser.add_argument("--quick", action="store_true", help="a few steps only")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = MiniMaxM1ForCausalLM(demo_config(tokenizer)).train()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    corpus = Corpus(tokenizer, args.seed)
    watched = draw(addition, random.Random(args.seed + 1), difficulty=DIGITS, count=250)
    started, curve = time.perf_counter(), []
    for stage in (PRETRAINING, COLD_START):
        steps, every = (15, 5) if args.quick else (stage.steps, 50)
        recent: list[dict[str, float]] = []
        for record in islice(train(model, corpus, stage), steps):
            recent.append(record)
            if len(recent) < every:
                continue
            row = {"stage": stage.name, "seconds": round(time.perf_counter() - started)}
            row |= {name: round(sum(r[name] for r in recent) / every, 4) for name in record}
            row |= {"step": record["step"], "greedy": accuracy(model, tokenizer, watched)}
            recent.clear()
            curve.append(row)
            print(json.dumps(row), flush=True)
            if stage is COLD_START and row["greedy"] >= args.stop_at:
                break
    save(model.eval(), tokenizer, args.out)
    results = measure(args.out, tokenizer, count=100 if args.quick else 1000)
    print(json.dumps(results))
    (args.out / "README.md").write_text(card(model, curve, results, args))


def save(model: MiniMaxM1ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Weights in bfloat16 (routers in float32, as in the releases), config and tokenizer."""
    for name, parameter in model.named_parameters():
        if "block_sparse_moe.gate." not in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measure(folder: Path, tokenizer: PreTrainedTokenizerFast, *, count: int) -> dict[str, list[float]]:
    """Accuracies of the saved checkpoint on held-out problems, in float32 and bfloat16."""
    problems = draw(addition, random.Random(2), difficulty=DIGITS, count=count, held_out_only=True)
    results = {"greedy": [], "sampled": []}
    for dtype in (torch.float32, torch.bfloat16):
        model = MiniMaxM1ForCausalLM.from_pretrained(folder, dtype=dtype)
        for way, found in results.items():
            torch.manual_seed(0)
            found.append(accuracy(model, tokenizer, problems, sampled=way == "sampled"))
    return results


def card(
    model: MiniMaxM1ForCausalLM, curve: list[dict], results: dict[str, list[float]], args: argparse.Namespace
) -> str:
    """The checkpoint's README, `demo_card.md` filled in: how it was made, what was measured, its limits."""
    names = ("stage", "step", "seconds", "text", "addition", "gradient", "greedy")
    template = (Path(__file__).parent / "demo_card.md").read_text(encoding="utf-8")
    return template.format(
        config=model.config,
        parameters=sum(p.numel() for p in model.parameters()),
        options=f"--seed {args.seed} --stop-at {args.stop_at}{' --quick' * args.quick}",
        limit=10**DIGITS,
        results="\n".join(f"| {way} | {wide:.3f} | {half:.3f} |" for way, (wide, half) in results.items()),
        curve="\n".join(f"| {' | '.join(str(step[name]) for name in names)} |" for step in curve),
    )


if __name__ == "__main__":
    main()
