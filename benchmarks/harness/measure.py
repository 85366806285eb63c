"""Time and memory: sides that take turns, peaks in a process of their own, tests that must pass first."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

import torch
from tqdm import tqdm

from .rows import ROOT, Row, measured

LONG = 20.0  # seconds of a first round that is counted
QUICK_BUDGET, BUDGET = 1.0, 45.0  # seconds for the rounds of one task
Work = Callable[[], object]


class Stopped(Exception):
    """A case ends early, for a reason to be printed; 0 if all is well."""

    def __init__(self, reason: str, *, status: int = 0):
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Task:
    """One thing to time. For "decode", `length` is the context that a token attends to."""

    kind: str
    length: int
    batch: int = 1
    dtype: str = "float32"
    rounds: int = 5
    memory: bool = False
    without: tuple[str, ...] = ()  # sides that do not take part


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def taking_part(case: ModuleType, task: Task) -> tuple[str, ...]:
    """The sides that this machine can run for a task; Triton's kernels need a GPU."""
    absent = task.without if torch.cuda.is_available() else (*task.without, "triton")
    return tuple(side for side in case.SIDES if side not in absent)


def timed(name: str, case: ModuleType, *, quick: bool = False, only: str = "") -> Iterator[Row]:
    """Rows of a comparison: of every task the time of every side and, unless `quick`, peak memory."""
    tasks = list(enumerate(case.QUICK if quick else case.TASKS))
    tasks = [(i, task) for i, task in tasks if only in f"{task.kind} {task.dtype} {task.length}"]
    rounds = [task.rounds for _, task in tasks]
    with tqdm(total=sum(rounds), unit="round", disable=None) as bar:
        for number, (index, task) in enumerate(tasks):
            bar.n = sum(rounds[:number])  # a task may end before its last round
            bar.set_description(f"{name} {task.kind} {task.length} {task.dtype}")
            sides = {side: case.prepare(side, task) for side in taking_part(case, task)}
            budget = QUICK_BUDGET if quick else BUDGET
            shape = dict(task=task.kind, length=task.length, batch=task.batch, dtype=task.dtype)
            seconds = interleaved(sides, rounds=task.rounds, budget=budget, tick=bar.update)
            for side, values in seconds.items():
                yield measured(values, case=name, side=side, **shape, metric="time", unit="s")
            del sides
            for side in taking_part(case, task) if task.memory and not quick else ():
                peak = [peak_in_own_process(name, side, index)]
                yield measured(peak, case=name, side=side, **shape, metric="peak memory", unit="B")
        bar.n = sum(rounds)


def interleaved(
    sides: dict[str, Work],
    *,
    rounds: int,
    budget: float = float("inf"),
    tick: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of every round of each side.

    The sides take turns within a round, so a slow spell of the machine meets all of them. A first round
    warms up and is not counted, unless it took more than LONG seconds. Ends after `rounds`, or once `budget`
    seconds are spent and one round is counted; `tick` is called after each round.
    """
    started = time.perf_counter()
    first = {name: _seconds(work) for name, work in sides.items()}
    long = sum(first.values()) > LONG
    seconds = {name: [took] if long else [] for name, took in first.items()}
    for done in range(long, rounds):
        if done and time.perf_counter() - started > budget:
            break
        for name, work in sides.items():
            seconds[name].append(_seconds(work))
        tick()
    return seconds


def _seconds(work: Work) -> float:
    _synchronize()
    start = time.perf_counter()
    work()
    _synchronize()
    return time.perf_counter() - start


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes(work: Work | None = None) -> int:
    """The most memory in use during `work`, or so far: of the GPU if there is one, else of this process."""
    if torch.cuda.is_available():
        if work is not None:
            torch.cuda.reset_peak_memory_stats()
            work()
            torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    if work is not None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # forget the highest mark so far
        except OSError as refused:
            raise ValueError(f"peak memory needs Linux's /proc/self/clear_refs: {refused}") from refused
        work()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def peak_in_own_process(case: str, side: str, index: int) -> int:
    """`peak_bytes` of one side of one task, in a process that does nothing else."""
    threads = str(torch.get_num_threads())
    command = [sys.executable, "-m", "benchmarks.run", "--case", case, "--threads", threads]
    command += ["--peak", side, str(index)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return int(done.stdout.split()[-1])


def peak_of_task(case: ModuleType, side: str, index: int) -> int:
    task = case.TASKS[index]
    work = case.prepare(side, task)
    if task.kind == "train":
        work()  # from the second step on the optimiser's moments are there too
    return peak_bytes(work)


def require_green(name: str, tests: tuple[str, ...]) -> None:
    """Run the tests that must pass before something is measured; leave with their output if one does not."""
    if not tests:
        return
    print(f"{name}: its tests first", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        output = (done.stdout + done.stderr)[-3000:]
        raise SystemExit(f"{name} is not measured, its tests fail:\n{output}")


def each(run: Callable[..., list[Row]], jobs: list[tuple], *, processes: int) -> Iterator[Row]:
    """The rows of `run(*job)` for every job, in order; so many at a time, in processes of one thread."""
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (1,)) as pool:
        for rows in pool.map(run, *zip(*jobs, strict=True)):
            yield from rows
