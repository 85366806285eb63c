"""A million tokens through the demo-size model: prefill in pieces in bounded memory, then decode after it.

    python -m benchmarks.million                    1,000,000 tokens; stops and goes on with the same command
    python -m benchmarks.million --length 131072    measure this first
    python -m benchmarks.million --seconds 60       stop after about a minute, to go on later
    python -m benchmarks.million --quick            8K tokens, prints, writes nothing

The cache and the time so far are kept in runs/million.pt, every 64K tokens and when `--seconds` are over, and
removed at the end. A piece's seconds are counted when it is done, so nothing is counted twice.
"""

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from minimax_hybrid.cache import HybridCache
from minimax_hybrid.chunked_prefill import prefill
from minimax_hybrid.model import MiniMaxM1ForCausalLM

from .measure import ROOT, device_slug, percentiles, place, require
from .models import small_config
from .rows import RESULTS, Row, append
from .tables import write_pages

PIECE, SAVE_EVERY, DECODED = 8192, 65536, 64
MILESTONES = (131_072, 262_144, 524_288, 1_000_000)
KEPT = ROOT / "runs" / "million.pt"


@dataclass
class Progress:
    """Where a run stands; enough to go on after an interruption."""

    cache: HybridCache
    done: int = 0
    seconds: list[tuple[int, float]] = field(default_factory=list)  # positions done, seconds of that piece
    peak: int = 0  # bytes


def run(
    length: int, *, piece: int = PIECE, kept: Path | None = KEPT, seconds: float = float("inf")
) -> tuple[Progress, list[float]]:
    """Prefill `length` tokens, going on from `kept` if it is there, then time DECODED steps.

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
            progress.peak = max(progress.peak, resident_peak())
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
    where, rows = place(), []

    def row(task: str, length: int, metric: str, unit: str, values: list[float]) -> None:
        p20, p50, p80 = percentiles(values)
        shape = dict(task=task, length=length, batch=1, dtype="float32", metric=metric, unit=unit)
        rows.append(Row("million", "hybrid", **shape, p20=p20, p50=p50, p80=p80, rounds=len(values), **where))

    for milestone in [n for n in MILESTONES if n <= progress.done]:
        row("prefill", milestone, "time", "s", [sum(s for done, s in progress.seconds if done <= milestone)])
    last = [s for _, s in progress.seconds[-4:-1] or progress.seconds]
    row("last pieces of 8,192", progress.done, "time", "s", last)
    row("decode", progress.done, "time", "s", steps)
    row("prefill", progress.done, "peak memory", "B", [float(progress.peak)])
    return rows


def resident_peak() -> int:
    """The most memory that this process ever held, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.million", description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    require("million", "tests/model/test_chunked_prefill.py")
    if args.quick:
        progress, steps = run(8192, kept=None)
    else:
        progress, steps = run(args.length, seconds=args.seconds)
    if not steps:
        print(f"{progress.done:,} tokens done; the same command goes on from there")
        return
    rows = rows_of(progress, steps)
    for row in rows:
        print(f"{row.task:24} {row.length:>9,}  {row.metric:12} {row.p50:.6g} {row.unit}")
    if not args.quick:
        append(RESULTS / f"{device_slug()}.csv", rows)
        write_pages()
        KEPT.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
