"""Markdown tables of the committed rows.

    python -m benchmarks.tables                  writes results/<device>.md for every CSV
    python -m benchmarks.tables --case native    prints the table of one case
    python -m benchmarks.tables --readme         fills the README's tables

In the README a table stands between `<!-- rows: native -->` and `<!-- end of rows -->`; `native_origin` there
is the command and the place alone, to stand under a picture.

A number is the median; ± is half the distance from the 20th to the 80th percentile.
"""

import argparse
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from minimax_hybrid.cost.plotting import tokens

from .cases import CASES
from .measure import ROOT
from .rows import RESULTS, Row, files, mean_over_seeds, newest, read

README = ROOT / "README.md"
_ABOUT = {
    "passkey": "Four digits hidden in random filler, asked for at the end: share of inputs with all four "
    "right, for models that differ only in the kinds of their eight layers (width 64, 4 heads of 32), "
    "trained on up to 256 tokens.",
    "lightning on a GPU": "Lightning attention by backend and its peers, heads of 128, bfloat16.",
    "million": "The small model of `twin`, prefilled in pieces of 8,192 tokens. Its one softmax layer "
    "attends to the past without a mask and merges it with the piece by log-sum-exp.",
}
_MODULES = {"lightning on a GPU": "gpu_lightning"}
_MARKED = re.compile(r"(<!-- rows: (\w+) -->)\n.*?(<!-- end of rows -->)", re.DOTALL)
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
        cells = [_task_name(task), task[3], *(_time(row) for row in times)]
        cells += [_ratio(row, times[0]) for row in times[1:]]
        for metric in others:
            cells += [_CELLS[metric][1](found.get((task, side, metric))) for side in sides]
        lines.append(cells)
    return markdown(head, lines)


def page(path: Path) -> str:
    """The page of one device."""
    rows = read(path)
    device = rows[-1].device if rows else path.stem
    text = [
        f"# {device}",
        "",
        f"Written by `python -m benchmarks.tables` from `{path.name}`, the newest row of each number. "
        "Where sides are compared, medians of interleaved rounds; ± is half the distance from the 20th to "
        "the 80th percentile. Peak is the most resident memory of a process that does nothing else, weights "
        "and libraries included.",
    ]
    measured = dict.fromkeys(row.case for row in rows)
    for name in sorted(measured, key=lambda name: list(CASES).index(name) if name in CASES else len(CASES)):
        of_case = [row for row in rows if row.case == name]
        text += ["", f"## {name}", "", *_about(name), _table(of_case), "", provenance(of_case)]
    return "\n".join(text) + "\n"


def _about(name: str) -> list[str]:
    if name in CASES:
        about = CASES[name].about
        return [f"{about[0].upper()}{about[1:]}.", ""]
    return [_ABOUT[name], ""] if name in _ABOUT else []


def _table(rows: list[Row]) -> str:
    return {"passkey": passkey_table, "million": million_table}.get(rows[0].case, case_table)(rows)


def passkey_table(rows: list[Row]) -> str:
    """Needles found, one line for each length, the mean over a side's seeds."""
    sides = list(dict.fromkeys(row.side for row in rows))
    trained = [row for row in rows if row.metric == "loss"]
    seeds = {side: len({row.task for row in trained if row.side == side}) for side in sides}
    found = {
        (row.side, row.length): row
        for row in mean_over_seeds([row for row in rows if row.metric == "accuracy"])
    }
    head = ["input, tokens", "type", *sides]
    lines = [
        [tokens(T), rows[0].dtype, *(_share(found.get((side, T))) for side in sides)]
        for T in sorted({length for _, length in found})
    ]
    losses = {row.side: row for row in mean_over_seeds(trained)}
    times = {row.side: row for row in mean_over_seeds([row for row in rows if row.metric == "time"])}
    lines.append(["models trained", "", *(str(seeds[side]) for side in sides)])
    lines.append(["training loss, nats a digit", "", *(f"{losses[side].p50:.3f}" for side in sides)])
    lines.append(["training steps", "", *(f"{losses[side].rounds // seeds[side]:,}" for side in sides)])
    lines.append(["training, one core", "", *(f"{times[side].p50:.0f} s" for side in sides)])
    return markdown(head, lines)


def million_table(rows: list[Row]) -> str:
    """What the long prefill took, by milestone, and decoding after it."""
    lines = []
    for row in rows:
        if row.metric == "peak memory":
            lines.append([f"peak memory of the process, {tokens(row.length)}", row.dtype, _memory(row), ""])
        elif row.task == "prefill":
            rate = f"{row.length / row.p50:,.0f} tokens/s"
            lines.append([f"prefill of {tokens(row.length)}", row.dtype, f"{row.p50:,.0f} s", rate])
        elif row.task == "decode":
            step = f"{row.p50 * 1e3:.0f} ms"
            lines.append([f"decode after {tokens(row.length)}", row.dtype, step, _time(row)])
        else:
            lines.append([f"{row.task}, at {tokens(row.length)}", row.dtype, _time(row), ""])
    return markdown(["what", "type", "time or size", "rate"], lines)


def provenance(rows: list[Row]) -> str:
    """The command, and where, when and with what the rows of one case were measured, all that there was."""
    name = rows[0].case
    command = f"run --case {name}" if name in CASES else _MODULES.get(name, name)
    threads = sorted({row.threads for row in rows})

    def each(values: Iterable[object]) -> str:
        return ", ".join(sorted({str(value) for value in values}))

    return (
        f"`python -m benchmarks.{command}`, {each(row.date[:10] for row in rows)}, "
        f"{each(row.device for row in rows)}, {' or '.join(map(str, threads))} "
        f"thread{'s' * (threads != [1])}, torch {each(row.torch for row in rows)}, "
        f"transformers {each(row.transformers for row in rows)}, commit {each(row.commit for row in rows)}."
    )


def markdown(head: list[str], lines: list[list[str]]) -> str:
    rule = ["---", "---", *["---:"] * (len(head) - 2)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def readme_table(name: str) -> str:
    """The table of one case with its provenance, or that alone, on the device whose rows are newest."""
    case = name.removesuffix("_origin")
    rows = newest(case)
    if rows and name != case:
        return provenance(rows)
    return f"{_table(rows)}\n\n{provenance(rows)}" if rows else "Not measured."


def filled(text: str, table: Callable[[str], str] = readme_table) -> str:
    """A document with every table between its marks made anew."""
    return _MARKED.sub(lambda found: f"{found[1]}\n{table(found[2])}\n{found[3]}", text)


def index() -> str:
    """The page that lists the devices, and says so if no GPU is among them."""
    text = ["# Results", "", "Written by `python -m benchmarks.tables`.", ""]
    text += ["- [Figure 1 (right) of the M1 report](figure1.md), counts only"]
    devices = {path: read(path) for path in files()}
    for path, rows in devices.items():
        cases = dict.fromkeys(row.case for row in rows)
        text.append(f"- [{rows[-1].device}]({path.stem}.md): {', '.join(cases)}")
    if all(row.device.endswith(" cores") for rows in devices.values() for row in rows):
        text += ["", "No GPU has been measured, so there is no table of one."]
    return "\n".join(text) + "\n"


def write_pages() -> list[Path]:
    """The index, and a page for every CSV."""
    pages = {RESULTS / "README.md": index()} | {path.with_suffix(".md"): page(path) for path in files()}
    for path, text in pages.items():
        path.write_text(text)
    return list(pages)


def _task(row: Row) -> tuple[str, int, int, str]:
    return row.task, row.length, row.batch, row.dtype


def _order(task: tuple[str, int, int, str]) -> tuple:
    kind, length, batch, dtype = task
    return dtype != "float32", _ORDER.index(kind) if kind in _ORDER else len(_ORDER), length, batch


def _task_name(task: tuple[str, int, int, str]) -> str:
    kind, length, batch, _ = task
    shape = tokens(length) if batch == 1 else f"{batch} x {tokens(length)}"
    return f"decode after {shape}" if kind == "decode" else f"{kind} {shape}"


def _time(row: Row | None) -> str:
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


def _share(row: Row | None) -> str:
    return "-" if row is None else f"{row.p50:.0%} of {row.rounds}"


def _percent(row: Row | None) -> str:
    return "-" if row is None else f"{row.p50:.0%}"


def _memory(row: Row | None) -> str:
    return "-" if row is None else f"{row.p50 / 1e9:.2f} GB"


_CELLS = {"peak memory": ("peak", _memory), "roofline": ("of roofline", _percent)}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.tables", description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=[*CASES, "passkey", "million"])
    parser.add_argument("--readme", action="store_true")
    args = parser.parse_args(argv)
    if args.readme:
        README.write_text(filled(README.read_text()))
    elif args.case:
        print(readme_table(args.case))
    else:
        for path in write_pages():
            print(f"wrote {path.relative_to(RESULTS.parent.parent)}")


if __name__ == "__main__":
    main()
