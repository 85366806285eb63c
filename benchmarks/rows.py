"""One CSV per device: a row is one measured number with its percentiles and where it came from.

A share (of needles found) has no percentiles: its p20 and p80 are one standard error away.

Rows are only appended. A reader takes the last row of each key: the newest measurement of that number.
"""

import csv
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    case: str
    side: str
    task: str
    length: int
    batch: int
    dtype: str
    metric: str
    unit: str
    p20: float
    p50: float
    p80: float
    rounds: int
    device: str
    threads: int
    torch: str
    triton: str
    transformers: str
    commit: str
    date: str

    @property
    def key(self) -> tuple:
        """What was measured, without where and when."""
        return self.case, self.side, self.task, self.length, self.batch, self.dtype, self.metric


COLUMNS = [field.name for field in fields(Row)]


def append(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            numbers = {name: f"{getattr(row, name):.6g}" for name in ("p20", "p50", "p80")}
            writer.writerow(asdict(row) | numbers)


def read(path: Path, case: str | None = None) -> list[Row]:
    """The newest row of each key, in the order in which the keys first appeared."""
    if not path.exists():
        return []
    newest: dict[tuple, Row] = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            counts = {name: int(line[name]) for name in ("length", "batch", "rounds", "threads")}
            numbers = {name: float(line[name]) for name in ("p20", "p50", "p80")}
            row = Row(**{**line, **counts, **numbers})
            if case is None or row.case == case:
                newest[row.key] = row
    return list(newest.values())


def files() -> list[Path]:
    """The CSV of every device that was measured."""
    return sorted(RESULTS.glob("*.csv"))


def newest(case: str) -> list[Row]:
    """The rows of a case on the device that has the newest of them."""
    measured = [rows for rows in (read(path, case) for path in files()) if rows]
    return max(measured, key=lambda rows: max(row.date for row in rows), default=[])


def mean_over_seeds(rows: list[Row]) -> list[Row]:
    """One row for each side and length, the mean of the rows that differ in their task (its seed)."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.side, row.length), []).append(row)
    means = []
    for group in groups.values():
        numbers = ("p20", "p50", "p80")
        values = {name: sum(getattr(row, name) for row in group) / len(group) for name in numbers}
        means.append(replace(group[0], **values, rounds=sum(row.rounds for row in group)))
    return means
