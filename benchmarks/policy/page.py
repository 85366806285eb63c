"""Fills the tables of README.md from the committed rows.

    python -m benchmarks.policy.page

A table stands between `<!-- rows: name -->` and `<!-- end of rows -->`; the words around it are written by
hand.
"""

from collections.abc import Iterable
from pathlib import Path
from statistics import mean

from benchmarks import tables
from benchmarks.policy.objectives import COMPARISONS, OBJECTIVES, steps_to
from benchmarks.policy.records import Row, origin, read_rows

PAGE = Path(__file__).parent / "README.md"


def filled(text: str) -> str:
    """The page's text with every table made anew."""
    return tables.filled(text, lambda name: TABLES[name]())


def addition() -> str:
    rows = [row for row in read_rows("addition") if "greedy" in row]
    seeds = sorted({row["seed"] for row in rows})
    batches = sorted({row["batch"] for row in rows})[::2]
    cells = {(row["seed"], row["batch"]): row for row in rows}
    table = []
    for seed in seeds:
        seconds = cells[seed, batches[-1]]["seconds"]
        table.append([f"{seed}", *(f"{cells[seed, b]['greedy']:.3f}" for b in batches), f"{seconds:.0f} s"])
    return _table("addition", ["seed", *(f"batch {b}" for b in batches), "rollouts and training"], table)


def objectives(task: str) -> str:
    rows = read_rows(f"objectives_{task}")
    value, target = COMPARISONS[task].measured, COMPARISONS[task].target
    table = []
    for name in OBJECTIVES:
        mine = [row for row in rows if row["objective"] == name]
        seeds = sorted({row["seed"] for row in mine})
        runs = [[row for row in mine if row["seed"] == seed and "batch" in row] for seed in seeds]
        steps = [steps_to(run, value, target) for run in runs]
        last = [next(row[value] for row in reversed(run) if value in row) for run in runs]
        measured = [row for run in runs for row in run if "entropy" in row]
        final = [[row for row in run if "entropy" in row][-1]["entropy"] for run in runs]
        cells = [
            name,
            ", ".join("not reached" if s is None else str(s) for s in steps),
            ", ".join(f"{x:.2f}" for x in last),
            f"{mean(row['dropped'] for row in measured):.4f}",
            f"{mean(final):.3f}",
        ]
        if task == "recheck":
            said = sum(row["waits"] for row in measured)
            cells.append(f"{sum(row['waits_dropped'] for row in measured) / max(1, said):.4f}")
            half = [steps_to(run, "waits", 128) for run in runs]
            cells.insert(2, ", ".join("not reached" if s is None else str(s) for s in half))
        table.append(cells)
    head = ["", f"steps to {value} {target}", f"last {value}", "tokens dropped", "last entropy"]
    if task == "recheck":
        head = [*head[:2], 'steps to "wait" in half', *head[2:], '`w` of "wait" dropped']
    return _table(f"objectives_{task}", head, table)


def dropped(task: str) -> str:
    """The ten tokens with the largest share dropped, of those trained on at least a thousandth of the
    time."""
    rows = [row for row in read_rows(f"objectives_{task}") if "dropped_and_seen_by_token" in row]
    table = []
    for name in OBJECTIVES:
        total: dict[str, list[int]] = {}
        for row in rows:
            if row["objective"] == name:
                for token, (gone, seen) in row["dropped_and_seen_by_token"].items():
                    entry = total.setdefault(token, [0, 0])
                    entry[0], entry[1] = entry[0] + gone, entry[1] + seen
        everything = sum(seen for _, seen in total.values())
        common = {t: gone / seen for t, (gone, seen) in total.items() if seen > everything / 1000}
        worst = sorted(common, key=common.get, reverse=True)[:10]
        listed = ", ".join(f"`{t}` {100 * common[t]:.1f} %" for t in worst if common[t] > 0)
        table.append([name, listed or "none"])
    return _table(f"objectives_{task}", ["", "tokens most often dropped"], table)


def head() -> str:
    table = [
        [
            row["body"], row["head"], row["decode"], row["routing"],
            f"{row['correlation']:.8f}", f"{row['probability_mean']:.1e}", f"{row['probability_max']:.1e}",
            f"{row['log_ratio_max']:.1e}", f"{row['other_experts']:.5f}",
        ]
        for row in read_rows("head")
        if "correlation" in row
    ]  # fmt: skip
    names = ["body", "head", "decode", "experts in training", "Pearson r", "mean difference", "largest",
             "largest log-ratio", "other experts"]  # fmt: skip
    return _table("head", names, table)


def layers() -> str:
    rows = [row for row in read_rows("head") if "layer" in row]
    found = {(row["body"], row["layer"]): row for row in rows}
    table = []
    for row in rows:
        if row["body"] == "bfloat16":
            both = [found[body, row["layer"]] for body in ("bfloat16", "float32")]
            cells = [cell for r in both for cell in (f"{100 * r['equal']:.1f} %", f"{r['relative_gap']:.1e}")]
            table.append([f"{row['layer']}", row["kind"], *cells])
    names = ["after layer", "kind", "bfloat16: equal", "gap", "float32: equal", "gap"]
    return _table("head", names, table)


def adam() -> str:
    rows = [row for row in read_rows("adam") if "greedy" in row]
    batches = sorted({row["batch"] for row in rows})[::5]
    table = []
    for scale, name in sorted({(row["scale"], row["adam"]) for row in rows}, reverse=True):
        mine = [row for row in rows if (row["scale"], row["adam"]) == (scale, name)]
        table.append([name, f"{scale:g}", *(_each(mine, "greedy", batch) for batch in batches)])
    return _table("adam", ["AdamW", "gradients times", *(f"batch {b}" for b in batches)], table)


def _each(rows: list[Row], value: str, batch: int) -> str:
    """A value at a batch, one for each seed."""
    return ", ".join(f"{row[value]:.3f}" for row in rows if row["batch"] == batch)


TABLES = {
    "addition": addition,
    "objectives_addition": lambda: objectives("addition"),
    "objectives_recheck": lambda: objectives("recheck"),
    "dropped_addition": lambda: dropped("addition"),
    "dropped_recheck": lambda: dropped("recheck"),
    "head": head,
    "layers": layers,
    "adam": adam,
}


def _table(name: str, head: list[str], lines: Iterable[list[str]]) -> str:
    where = origin(name)
    body = [head, ["---"] * len(head), *lines]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in body)
    return (
        f"{text}\n\n`{where['command']}` on a {where['device']}, {where['threads']} thread(s), "
        f"torch {where['torch']}, commit {where['commit']}, {where['date']}; "
        f"rows: [`{name}.jsonl`](../results/policy/{name}.jsonl)"
    )


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
