"""Measurements as rows of CSV files: what was measured, its percentiles, and where it came from.

Rows are only appended, to one file per device; what a policy learned does not depend on the device and goes
to `policy.csv`. A reader takes the last row of each key: the newest measurement of that number.

A row may keep the numbers themselves in `values`, one a round, a training batch or a token, and in `at` what
each belongs to. A share (of needles found) has no percentiles: its p20 and p80 are one standard error away.
"""

import csv
import json
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from minimax_hybrid.cost.this_machine import cpu_name

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
_INTEGERS = ("length", "batch", "seed", "rounds", "threads")
_PERCENTILES = ("p20", "p50", "p80")
_LISTS = ("at", "values")


@dataclass(frozen=True, kw_only=True)
class Row:
    case: str
    side: str
    task: str
    length: int = 0  # tokens; 0 where it has none
    batch: int = 0
    dtype: str = "float32"
    seed: int = 0
    metric: str
    unit: str
    p20: float
    p50: float
    p80: float
    rounds: int
    at: tuple = ()
    values: tuple[float, ...] = ()
    options: str = ""  # of the command, beyond the case's name; the runner fills it in
    device: str
    cpu: str
    threads: int
    torch: str
    triton: str
    transformers: str
    commit: str  # with "+changes" if the code differed from it
    date: str

    @property
    def key(self) -> tuple:
        """What was measured, without where and when."""
        return self.case, self.side, self.task, self.length, self.batch, self.dtype, self.seed, self.metric


COLUMNS = [field.name for field in fields(Row)]


def measured(
    numbers: Sequence[float], *, case: str, side: str, task: str, metric: str, unit: str,
    length: int = 0, batch: int = 0, dtype: str = "float32", seed: int = 0,
    keep: bool = False, at: Sequence = (),
) -> Row:  # fmt: skip
    """A row of numbers taken here and now; `keep` or `at` has the row hold the numbers themselves."""
    p20, p50, p80 = percentiles(numbers)
    return Row(
        case=case, side=side, task=task, length=length, batch=batch, dtype=dtype, seed=seed, metric=metric,
        unit=unit, p20=p20, p50=p50, p80=p80, rounds=len(numbers), at=tuple(at),
        values=tuple(numbers) if keep or at else (), **provenance(),
    )  # fmt: skip


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile."""
    numbers = torch.tensor(list(values), dtype=torch.float64)
    return tuple(numbers.quantile(torch.tensor([0.2, 0.5, 0.8]).double()).tolist())


def append(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            numbers = {name: f"{getattr(row, name):.6g}" for name in _PERCENTILES}
            lists = {name: json.dumps(getattr(row, name)) if getattr(row, name) else "" for name in _LISTS}
            writer.writerow(asdict(row) | numbers | lists)


def read(path: Path, case: str | None = None) -> list[Row]:
    """The newest row of each key, in the order in which the keys first appeared."""
    if not path.exists():
        return []
    newest: dict[tuple, Row] = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            integers = {name: int(line[name]) for name in _INTEGERS}
            numbers = {name: float(line[name]) for name in _PERCENTILES}
            lists = {name: tuple(json.loads(line[name] or "[]")) for name in _LISTS}
            row = Row(**{**line, **integers, **numbers, **lists})
            if case is None or row.case == case:
                newest[row.key] = row
    return list(newest.values())


def file_of(case: str, folder: Path) -> Path:
    """The file that a case's rows of this machine go to."""
    return folder / ("policy.csv" if case.startswith("policy_") else f"{device_slug()}.csv")


def files() -> list[Path]:
    """The CSV of every device that was measured."""
    return sorted(path for path in RESULTS.glob("*.csv") if path.name != "policy.csv")


def newest(case: str) -> list[Row]:
    """The rows of a case on the device that has the newest of them."""
    found = [rows for rows in (read(path, case) for path in sorted(RESULTS.glob("*.csv"))) if rows]
    return max(found, key=lambda rows: max(row.date for row in rows), default=[])


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple, list[Row]]:
    """The rows that agree in these fields, by the fields' values, in order of first appearance."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    return groups


def mean_over_seeds(rows: list[Row]) -> list[Row]:
    """One row for each side and length, the mean of the rows that differ in their seed."""
    means = []
    for group in grouped(rows, "side", "length").values():
        values = {name: sum(getattr(row, name) for row in group) / len(group) for name in _PERCENTILES}
        means.append(replace(group[0], **values, rounds=sum(row.rounds for row in group)))
    return means


def provenance() -> dict[str, str | int]:
    """Where and with what: the columns that every row carries."""
    return {
        "device": device_name(),
        "cpu": cpu_name(),
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


@cache
def _commit() -> str:
    """The commit, with "+changes" if the code differs from it; "unknown" outside a git checkout."""
    code = ("minimax_hybrid", "kernels", "benchmarks/*.py")
    commands = (
        ["rev-parse", "--short", "HEAD"],
        ["status", "--porcelain", "--untracked-files=no", "--", *code],
    )
    try:
        commit, changed = (
            subprocess.run(
                ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+changes" if changed else "")
