"""Pages made of the committed rows: results/<device>.md, results/policy.md, and the tables of the README.

In a document a table stands between `<!-- rows: native -->` and `<!-- end of rows -->`; `native_origin` there
is the command and the place alone, to stand under a picture. `policy_head/layers` is one of a case's tables.

A number is the median; ± is half the distance from the 20th to the 80th percentile.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from minimax_hybrid.formatting import tokens

from .. import cases
from .rows import RESULTS, ROOT, Row, files, grouped, newest, read

README, POLICY = ROOT / "README.md", RESULTS / "policy.md"
_MARKED = re.compile(r"(<!-- rows: ([\w/]+) -->)\n.*?(<!-- end of rows -->)", re.DOTALL)
_ORDER = ("prefill", "decode", "train", "forward", "forward+backward", "log-probs")


def case_table(rows: list[Row]) -> str:
    """One line for each task of a case: time of every side (decode: tokens/s), ratio to the first, and what
    else was measured."""
    if not rows:
        return "Not measured."
    sides = list(dict.fromkeys(row.side for row in rows))
    others = [metric for metric in _CELLS if any(row.metric == metric for row in rows)]
    head = ["task", "type", *sides, *(f"{side} / {sides[0]}" for side in sides[1:])]
    head += [f"{side}, {_CELLS[metric][0]}" for metric in others for side in sides]
    found = {(_task(row), row.side, row.metric): row for row in rows}
    lines = []
    for task in sorted({_task(row): None for row in rows}, key=_order):
        times = [found.get((task, side, "time")) for side in sides]
        cells = [_task_name(task), task[3], *(time_cell(row) for row in times)]
        cells += [_ratio(row, times[0]) for row in times[1:]]
        for metric in others:
            cells += [_CELLS[metric][1](found.get((task, side, metric))) for side in sides]
        lines.append(cells)
    return markdown(head, lines)


def metric_table(rows: list[Row]) -> str:
    """One line for each task and side, a column for each metric."""
    metrics = list(dict.fromkeys(row.metric for row in rows))
    lines = []
    for key, group in grouped(rows, "task", "dtype", "side").items():
        found = {row.metric: f"{row.p50:.6g}" for row in group}
        lines.append([*key, *(found.get(metric, "-") for metric in metrics)])
    return markdown(["task", "type", "side", *metrics], lines, text=3)


def markdown(head: list[str], lines: Iterable[list[str]], *, text: int = 2) -> str:
    """A table whose first `text` columns are words and the others numbers."""
    rule = [*["---"] * text, *["---:"] * (len(head) - text)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def device_page(path: Path) -> str:
    rows = read(path)
    text = [
        f"# {rows[-1].device if rows else path.stem}",
        "",
        f"Written by `python -m benchmarks.run --pages` from `{path.name}`, the newest row of each number. "
        "Where sides are compared, medians of interleaved rounds; ± is half the distance from the 20th to "
        "the 80th percentile. Peak is the most resident memory of a process that does nothing else, weights "
        "and libraries included.",
    ]
    measured = grouped(rows, "case")
    for name in cases.CASES:
        if of := measured.get((name,)):
            about = cases.about(name)
            text += ["", f"## {name}", "", f"{about[0].upper()}{about[1:]}.", "", case_text(name, of)]
    return "\n".join(text) + "\n"


def case_text(name: str, rows: list[Row]) -> str:
    """The table of one case with its provenance."""
    return f"{table(name, rows)}\n\n{provenance(rows)}" if rows else "Not measured."


def table(name: str, rows: list[Row]) -> str:
    return getattr(cases.load(name), "table", case_table)(rows)


def provenance(rows: list[Row]) -> str:
    """The command, and where, when and with what the rows of one case were measured, all that there was."""

    def each(values: Iterable[object]) -> str:
        return ", ".join(sorted({str(value) for value in values}))

    threads = sorted({row.threads for row in rows})
    options = each(row.options for row in rows)
    return (
        f"`python -m benchmarks.run --case {rows[0].case}{' ' * bool(options)}{options}`, "
        f"{each(row.date[:10] for row in rows)}, "
        f"{each(row.device for row in rows)}, {' or '.join(map(str, threads))} "
        f"thread{'s' * (threads != [1])}, torch {each(row.torch for row in rows)}, "
        f"transformers {each(row.transformers for row in rows)}, commit {each(row.commit for row in rows)}."
    )


def marked(mark: str) -> str:
    """What stands between the marks: a case's table with its provenance, one of its tables, or the
    provenance alone, on the device whose rows are newest."""
    name, _, part = mark.removesuffix("_origin").partition("/")
    rows = newest(name)
    if not rows:
        return "Not measured."
    if part:
        rows, text = cases.load(name).tables(rows)[part]
        return f"{text}\n\n{provenance(rows)}"
    return provenance(rows) if mark.endswith("_origin") else case_text(name, rows)


def filled(text: str) -> str:
    """A document whose tables are written from the rows."""
    return _MARKED.sub(lambda found: f"{found[1]}\n{marked(found[2])}\n{found[3]}", text)


def index() -> str:
    """The page that lists the devices, and says so if no GPU is among them."""
    text = ["# Results", "", "Written by `python -m benchmarks.run --pages`.", ""]
    text += ["- [Figure 1 (right) of the M1 report](figure1.md), counts only"]
    text += ["- [Experiments with the policy](policy.md): learning, not speed"]
    devices = {path: read(path) for path in files()}
    for path, rows in devices.items():
        names = dict.fromkeys(row.case for row in rows)
        text.append(f"- [{rows[-1].device}]({path.stem}.md): {', '.join(names)}")
    if all(row.device == row.cpu for rows in devices.values() for row in rows):
        text += ["", "No GPU has been measured, so there is no table of one."]
    return "\n".join(text) + "\n"


def pages() -> dict[Path, str]:
    """Every page and what it should say."""
    found = {RESULTS / "README.md": index(), RESULTS / "figure1.md": cases.load("figure1").page()}
    found |= {path.with_suffix(".md"): device_page(path) for path in files()}
    return found | {path: filled(path.read_text()) for path in (README, POLICY) if path.exists()}


def _task(row: Row) -> tuple[str, int, int, str]:
    return row.task, row.length, row.batch, row.dtype


def _order(task: tuple[str, int, int, str]) -> tuple:
    kind, length, batch, dtype = task
    return dtype != "float32", _ORDER.index(kind) if kind in _ORDER else len(_ORDER), length, batch


def _task_name(task: tuple[str, int, int, str]) -> str:
    kind, length, batch, _ = task
    shape = tokens(length) if batch == 1 else f"{batch} x {tokens(length)}"
    return f"decode after {shape}" if kind == "decode" else f"{kind} {shape}"


def time_cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.rounds == 1:
        return f"{row.p50:.3g} s, once"
    spread = (row.p80 - row.p20) / 2
    if row.task == "decode":
        rate = row.batch / row.p50
        return f"{rate:.0f} ± {rate * spread / row.p50:.0f} tokens/s"
    if row.p50 < 1:
        return f"{row.p50 * 1e3:.3g} ± {spread * 1e3:.2g} ms"
    return f"{row.p50:.2f} ± {spread:.2g} s"


def _ratio(row: Row | None, first: Row | None) -> str:
    return "-" if row is None or first is None else f"{row.p50 / first.p50:.2f}x"


def _percent(row: Row | None) -> str:
    return "-" if row is None else f"{row.p50:.0%}"


def memory_cell(row: Row | None) -> str:
    return "-" if row is None else f"{row.p50 / 1e9:.2f} GB"


_CELLS = {"peak memory": ("peak", memory_cell), "roofline": ("of roofline", _percent)}
