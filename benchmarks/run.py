"""Run a case: its tests, then its tasks; append the rows and write the page.

python -m benchmarks.run                          what there is
python -m benchmarks.run --case native            rows go to benchmarks/results/<device>.csv
python -m benchmarks.run --case native --quick    a few rounds; prints, writes nothing
python -m benchmarks.run --quick                  every case, a few rounds each, within a minute
"""

import argparse
import time

import torch
from tqdm import tqdm

from .cases import CASES, Case, Task
from .measure import (
    device_slug,
    interleaved,
    peak_bytes,
    peak_in_own_process,
    percentiles,
    place,
    require,
)
from .rows import RESULTS, Row, append
from .tables import case_table, write_pages

QUICK_BUDGET, BUDGET = 1.0, 45.0  # seconds for the rounds of one task


def run_case(case: Case, *, quick: bool = False, only: str | None = None) -> list[Row]:
    """Test, time and, unless `quick`, append the rows of one case."""
    require(case.name, *case.tests)
    path = RESULTS / f"{device_slug()}.csv"
    found: list[Row] = []
    tasks = list(enumerate(case.quick if quick else case.tasks))
    if only is not None:
        tasks = [(i, task) for i, task in tasks if only in f"{task.kind} {task.dtype} {task.length}"]
    rounds = [task.rounds for _, task in tasks]
    with tqdm(total=sum(rounds), unit="round", disable=None) as bar:
        for number, (index, task) in enumerate(tasks):
            bar.n = sum(rounds[:number])  # a task may end before its last round
            bar.set_description(f"{case.name} {task.kind} {task.length} {task.dtype}")
            rows = run_task(case, index, task, quick=quick, tick=bar.update)
            if not quick:
                append(path, rows)
            found += rows
        bar.n = sum(rounds)
    return found


def run_task(case: Case, index: int, task: Task, *, quick: bool, tick) -> list[Row]:
    sides = {side: case.prepare(side, task) for side in case.taking_part(task)}
    budget = QUICK_BUDGET if quick else BUDGET
    seconds = interleaved(sides, rounds=task.rounds, budget=budget, tick=tick)
    where = place()

    def row(side: str, metric: str, unit: str, values: list[float]) -> Row:
        p20, p50, p80 = percentiles(values)
        shape = dict(task=task.kind, length=task.length, batch=task.batch, dtype=task.dtype)
        return Row(case.name, side, **shape, metric=metric, unit=unit, p20=p20, p50=p50, p80=p80,
                   rounds=len(values), **where)  # fmt: skip

    rows = [row(side, "time", "s", values) for side, values in seconds.items()]
    if task.memory and not quick:
        del sides
        for side in case.taking_part(task):
            rows.append(row(side, "peak memory", "B", [peak_in_own_process(case.name, side, index)]))
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.run", description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=[*CASES, "all"], help="what to run; 'all' takes most of an hour")
    parser.add_argument("--quick", action="store_true", help="a few rounds; writes nothing")
    parser.add_argument("--only", help="tasks whose 'kind dtype length' contains this")
    parser.add_argument(
        "--threads", type=int, default=None, help="CPU threads; all of the machine's by default"
    )
    parser.add_argument("--list", action="store_true", help="say what there is, as without a case")
    parser.add_argument("--peak", nargs=2, metavar=("SIDE", "INDEX"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.list or not (args.case or args.quick):
        for case in CASES.values():
            print(f"{case.name:10} {case.about}")
        return
    if args.peak:
        case, (side, index) = CASES[args.case], args.peak
        task = case.tasks[int(index)]
        work = case.prepare(side, task)
        if task.kind == "train":
            work()  # from the second step on the optimiser's moments are held too
        print(peak_bytes(work))
        return
    for name in CASES if args.case in (None, "all") else [args.case]:
        start = time.perf_counter()
        rows = run_case(CASES[name], quick=args.quick, only=args.only)
        print(f"\n{name}: {CASES[name].about}\n")
        print(case_table(rows))
        print(f"\n{time.perf_counter() - start:.0f} s on {place()['device']}")
        if not args.quick:
            write_pages()


if __name__ == "__main__":
    main()
