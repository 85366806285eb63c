"""Time and memory: interleaved rounds, percentiles, peak memory, and the columns that say where."""

import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from minimax_hybrid.cost.roofline import cpu_name

ROOT = Path(__file__).parent.parent
LONG = 20.0
Work = Callable[[], object]


def interleaved(
    sides: dict[str, Work],
    *,
    rounds: int,
    budget: float = float("inf"),
    tick: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of every round of each side.

    The sides take turns within a round, so a slow spell of the machine meets all of them. A first round
    warms up and is not counted, unless it took more than LONG seconds. Ends after `rounds`, or once `budget`
    seconds are spent and one round is counted; `tick` is called after each round.
    """
    started = time.perf_counter()
    first = {name: _timed(work) for name, work in sides.items()}
    long = sum(first.values()) > LONG
    seconds = {name: [took] if long else [] for name, took in first.items()}
    for done in range(long, rounds):
        if done and time.perf_counter() - started > budget:
            break
        for name, work in sides.items():
            seconds[name].append(_timed(work))
        tick()
    return seconds


def _timed(work: Work) -> float:
    _synchronize()
    start = time.perf_counter()
    work()
    _synchronize()
    return time.perf_counter() - start


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def percentiles(values: list[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile."""
    return tuple(
        torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8]).double()).tolist()
    )


def peak_bytes(work: Work) -> int:
    """The most memory held at once during `work`: of the GPU if there is one, else of this process."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget the highest mark so far
    except OSError as refused:
        raise ValueError(f"peak memory needs Linux's /proc/self/clear_refs: {refused}") from refused
    work()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def peak_in_own_process(case: str, side: str, index: int) -> int:
    """`peak_bytes` of one side of one task, in a process that holds nothing else."""
    threads = str(torch.get_num_threads())
    command = [sys.executable, "-m", "benchmarks.run", "--case", case, "--threads", threads]
    command += ["--peak", side, str(index)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return int(done.stdout.split()[-1])


def failing_tests(tests: tuple[str, ...]) -> str:
    """What pytest says if one of the tests fails or is missing; empty if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return (done.stdout + done.stderr)[-3000:] if done.returncode else ""


def require(name: str, *tests: str) -> None:
    """Run the tests that must pass before something is measured; leave with their output if one does not."""
    print(f"{name}: its tests first", file=sys.stderr, flush=True)
    if failure := failing_tests(tests):
        raise SystemExit(f"{name} is not measured, its tests fail:\n{failure}")


def place() -> dict[str, str | int]:
    """Where and with what: the columns that every row carries."""
    return {
        "device": device_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__.split("+")[0],
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
    }


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()


def device_slug() -> str:
    """The device's name as a file name."""
    kept = "".join(c if c.isalnum() else " " for c in device_name().lower())
    return "-".join(kept.split()) or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    code = ("minimax_hybrid", "kernels", "benchmarks/*.py")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *code)
    return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")
