"""Where the experiments keep their rows: JSON lines, each with the command and the place it came from."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers

RESULTS = Path(__file__).parent.parent / "results" / "policy"
FIGURES = Path(__file__).parent.parent / "figures"
Row = dict[str, Any]


def each(run: Callable[..., list[Row]], jobs: list[tuple], *, processes: int) -> Iterator[list[Row]]:
    """The rows of `run(*job)` for every job, in order; so many at a time, in processes of one thread."""
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (1,)) as pool:
        yield from pool.map(run, *zip(*jobs, strict=True))


def write_rows(name: str, rows: list[Row]) -> Path:
    """Replace an experiment's rows by those of this run, with a first row that says how they came about."""
    path = RESULTS / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in [_origin(), *rows]))
    return path


def read_rows(name: str) -> list[Row]:
    """An experiment's rows, without the first."""
    lines = (RESULTS / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[1:]]


def origin(name: str) -> Row:
    """The first row: command, commit, date, versions, device."""
    return json.loads((RESULTS / f"{name}.jsonl").read_text().split("\n", 1)[0])


def _origin() -> Row:
    root = Path(__file__).parent.parent.parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
    return {
        "command": " ".join(["python -m", sys.modules["__main__"].__spec__.name, *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "threads": torch.get_num_threads(),
    }
