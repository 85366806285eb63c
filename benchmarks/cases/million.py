"""A million tokens through the demo-size model: prefill in pieces in bounded memory, then decode after it.

    python -m benchmarks.run --case million                  1,000,000 tokens; the same command resumes it
    python -m benchmarks.run --case million --length 131072  measure this first
    python -m benchmarks.run --case million --seconds 60     stop after about a minute, to resume later
    python -m benchmarks.run --case million --quick          8K tokens, prints, writes nothing

The cache and the time so far are kept in runs/million.pt, every 64K tokens and when `--seconds` are over, and
removed at the end. A piece's seconds are counted when it is done, so nothing is counted twice.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from minimax_hybrid.cache import HybridCache
from minimax_hybrid.chunked_prefill import prefill
from minimax_hybrid.formatting import tokens
from minimax_hybrid.model import MiniMaxM1ForCausalLM

from ..harness.measure import Stopped, peak_bytes
from ..harness.models import small_config
from ..harness.pages import markdown, memory_cell, time_cell
from ..harness.rows import ROOT, Row, measured

ABOUT = (
    "the small model of `twin`, prefilled in pieces of 8,192 tokens; its one softmax layer attends to the "
    "past without a mask and merges it with the piece by log-sum-exp"
)
TESTS = ("tests/model/test_chunked_prefill.py",)
PIECE, SAVE_EVERY, DECODED = 8192, 65536, 64
MILESTONES = (131_072, 262_144, 524_288, 1_000_000)
KEPT = ROOT / "runs" / "million.pt"


@dataclass
class Progress:
    """Where a run stands; enough to resume it."""

    cache: HybridCache
    done: int = 0
    seconds: list[tuple[int, float]] = field(default_factory=list)  # positions done, seconds of that piece
    peak: int = 0  # bytes


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--length", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after about as long")


def run(options: argparse.Namespace) -> Iterator[Row]:
    if options.quick:
        progress, steps = prefill_and_decode(8192, kept=None)
    else:
        progress, steps = prefill_and_decode(options.length, seconds=options.seconds)
    if not steps:
        raise Stopped(f"{progress.done:,} tokens done; the same command resumes here")
    yield from rows_of(progress, steps)
    if not options.quick:
        KEPT.unlink(missing_ok=True)


def prefill_and_decode(
    length: int, *, piece: int = PIECE, kept: Path | None = KEPT, seconds: float = float("inf")
) -> tuple[Progress, list[float]]:
    """Prefill `length` tokens, from where `kept` stands if it is there, then time DECODED steps.

    Stops without decoding, with no steps, when the pieces of this call have taken `seconds`.
    """
    torch.manual_seed(0)
    model = MiniMaxM1ForCausalLM(small_config()).eval()
    ids = torch.randint(1, 8192, (1, length), generator=torch.Generator().manual_seed(0))
    progress = _resumed(kept, length) or Progress(HybridCache(model.config))
    with tqdm(total=length, initial=progress.done, unit="token", unit_scale=True, disable=None) as bar:
        before = len(progress.seconds)
        while progress.done < length:
            if sum(s for _, s in progress.seconds[before:]) > seconds:
                _save(progress, kept)
                return progress, []
            part = ids[:, progress.done : progress.done + piece]
            start = time.perf_counter()
            prefill(model, part, piece=piece, cache=progress.cache)
            progress.done += part.shape[1]
            progress.seconds.append((progress.done, time.perf_counter() - start))
            progress.peak = max(progress.peak, peak_bytes())
            bar.update(part.shape[1])
            if kept is not None and progress.done % SAVE_EVERY == 0:
                _save(progress, kept)
    return progress, _decode(model, ids, progress.cache)


def _decode(model: MiniMaxM1ForCausalLM, ids: torch.Tensor, cache: HybridCache) -> list[float]:
    token, seconds = ids[:, -1:], []
    with torch.inference_mode():
        for _ in range(DECODED):
            start = time.perf_counter()
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            seconds.append(time.perf_counter() - start)
    return seconds


def rows_of(progress: Progress, steps: list[float]) -> list[Row]:
    """Time from the start to each milestone, of the pieces there, of decoding at the end, and peak memory."""
    done = progress.done
    total = {T: sum(s for n, s in progress.seconds if n <= T) for T in MILESTONES if T <= done}
    last = [s for _, s in progress.seconds[-4:-1] or progress.seconds]
    numbers = [
        *(("prefill", T, "time", "s", [seconds]) for T, seconds in total.items()),
        ("last pieces of 8,192", done, "time", "s", last),
        ("decode", done, "time", "s", steps),
        ("prefill", done, "peak memory", "B", [float(progress.peak)]),
    ]
    what = dict(case="million", side="hybrid", batch=1)
    return [
        measured(values, **what, task=task, length=length, metric=metric, unit=unit)
        for task, length, metric, unit, values in numbers
    ]


def _save(progress: Progress, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    torch.save(progress, draft)
    draft.replace(path)


def _resumed(path: Path | None, length: int) -> Progress | None:
    if path is None or not path.exists():
        return None
    progress = torch.load(path, weights_only=False)  # our own file
    return progress if progress.done <= length else None


def table(rows: list[Row]) -> str:
    """What the long prefill took, by milestone, and decoding after it."""
    lines = []
    for row in rows:
        length, rate = tokens(row.length), ""
        if row.metric == "peak memory":
            what, size = f"peak memory of the process, {length}", memory_cell(row)
        elif row.task == "prefill":
            what, size = f"prefill of {length}", f"{row.p50:,.0f} s"
            rate = f"{row.length / row.p50:,.0f} tokens/s"
        elif row.task == "decode":
            what, size, rate = f"decode after {length}", f"{row.p50 * 1e3:.0f} ms", time_cell(row)
        else:
            what, size = f"{row.task}, at {length}", time_cell(row)
        lines.append([what, row.dtype, size, rate])
    return markdown(["what", "type", "time or size", "rate"], lines)
