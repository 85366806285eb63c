"""Curves of rows over lengths or training batches, in the style of `minimax_hybrid.cost.plotting`."""

from pathlib import Path
from typing import Any

from minimax_hybrid.cost.plotting import COLORS, token_axis

from .. import cases
from .rows import ROOT, Row, newest

FIGURES = ROOT / "benchmarks" / "figures"
LABELS = {
    "softmax": "softmax twin",
    "chunked": "lightning, by blocks",
    "reference": "lightning, token by token",
}
_COLOR = {"chunked": "lightning", "reference": "other"}


def draw_all(folder: Path = FIGURES) -> list[Path]:
    """Every picture for which there are rows, from the device that was measured last."""
    drawn = []
    for name in cases.CASES:
        case, rows = cases.load(name), newest(name)
        if hasattr(case, "draw") and (rows or name == "figure1"):
            drawn += case.draw(rows, folder)
    return drawn


def over_lengths(axis: Any, rows: list[Row], *, scale: float, labels: dict[str, str] = LABELS) -> None:
    """The median of each side, in a band from the 20th to the 80th percentile."""
    lengths = sorted({row.length for row in rows})
    for side in dict.fromkeys(row.side for row in rows):
        of_side = sorted((row for row in rows if row.side == side), key=lambda row: row.length)
        x = [row.length for row in of_side]
        color = COLORS[_COLOR.get(side, side)]
        axis.plot(x, [row.p50 * scale for row in of_side], "o-", color=color, label=labels.get(side, side))
        low, high = ([getattr(row, name) * scale for row in of_side] for name in ("p20", "p80"))
        axis.fill_between(x, low, high, color=color, alpha=0.2, lw=0)
    if lengths:
        token_axis(axis, lengths, every=1 + len(lengths) // 6)


def over_batches(
    axis: Any, rows: list[Row], *, color: str, label: str, style: str = "-", scale: int = 1
) -> None:
    """One thin curve for each row, whose values belong to training batches; the first carries the label."""
    for i, row in enumerate(rows):
        x = [scale * batch for batch in row.at]
        axis.plot(x, row.values, style, color=COLORS[color], lw=1, alpha=0.8, label=None if i else label)
