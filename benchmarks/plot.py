"""Pictures of the committed rows; measures nothing.

python -m benchmarks.plot        figures/twin.svg, operators.svg and passkey.svg, as far as measured
"""

from pathlib import Path
from typing import Any

from minimax_hybrid.cost.plotting import COLORS, picture, token_axis

from .rows import Row, mean_over_seeds, newest

FIGURES = Path(__file__).parent / "figures"
_COLOR = {"hybrid": "hybrid", "softmax": "softmax", "lightning": "lightning", "chunked": "lightning",
          "reference": "other"}  # fmt: skip
_LABEL = {"softmax": "softmax twin", "chunked": "lightning, by blocks",
          "reference": "lightning, token by token"}  # fmt: skip


def draw_all(folder: Path = FIGURES) -> list[Path]:
    """Every picture for which there are rows, from the device that was measured last."""
    drawn = []
    for name, draw in (("twin", draw_twin), ("operators", draw_operators), ("passkey", draw_passkey)):
        rows = newest(name)
        if rows:
            path = folder / f"{name}.svg"
            draw(rows, path)
            drawn.append(path)
    return drawn


def draw_twin(rows: list[Row], path: Path) -> None:
    """Prefill, decode and memory of the hybrid and its softmax twin over context."""
    panels = (
        ("prefill", "time", "prefill, s", 1.0),
        ("decode", "time", "one decoded token, ms", 1e3),
        ("prefill", "peak memory", "peak memory of prefill, GB", 1e-9),
    )
    measured = [(panel, [row for row in rows if (row.task, row.metric) == panel[:2]]) for panel in panels]
    measured = [(panel, of_panel) for panel, of_panel in measured if of_panel]
    with picture(path, panels=len(measured)) as axes:
        for axis, ((_, _, title, scale), of_panel) in zip(axes, measured, strict=True):
            _curves(axis, of_panel, scale=scale, labels=_LABEL)
            axis.set_title(title)
            axis.set_xlabel("context, tokens")
        axes[0].set_yscale("log")
        for axis in axes[1:]:
            axis.set_ylim(bottom=0)
        axes[0].legend()


def draw_operators(rows: list[Row], path: Path) -> None:
    with picture(path, panels=2) as axes:
        for axis, task in zip(axes, ("forward", "forward+backward"), strict=True):
            labels = _LABEL | {"softmax": "softmax (SDPA)"}
            _curves(axis, [row for row in rows if row.task == task], scale=1e3, labels=labels)
            axis.set_title(f"{task}, ms")
            axis.set_yscale("log")
            axis.set_xlabel("tokens")
        axes[0].legend()


def draw_passkey(rows: list[Row], path: Path) -> None:
    """Share of needles found against the length of the input; the mean over seeds where there are several."""
    rows = [row for row in rows if row.metric == "accuracy"]
    trained = [row for row in newest("passkey") if row.task.startswith("train")]
    with picture(path) as (axis,):
        _curves(axis, mean_over_seeds(rows), scale=100.0, labels={"hybrid": "7 lightning + 1 softmax",
                "lightning": "8 lightning", "softmax": "8 softmax"})  # fmt: skip
        if trained:
            axis.axvline(trained[0].length, color=COLORS["other"], lw=0.8, ls=":")
            axis.annotate(" trained up to here", (trained[0].length, 3), color=COLORS["other"], fontsize=8.5)
        axis.set_title("needles found, %")
        axis.set_ylim(-4, 104)
        axis.set_xlabel("input, tokens")
        axis.legend(loc="upper right")


def _curves(axis: Any, rows: list[Row], *, scale: float, labels: dict[str, str]) -> None:
    lengths = sorted({row.length for row in rows})
    for side in dict.fromkeys(row.side for row in rows):
        of_side = sorted((row for row in rows if row.side == side), key=lambda row: row.length)
        x = [row.length for row in of_side]
        color = COLORS[_COLOR[side]]
        axis.plot(x, [row.p50 * scale for row in of_side], "o-", color=color, label=labels.get(side, side))
        low, high = ([getattr(row, name) * scale for row in of_side] for name in ("p20", "p80"))
        axis.fill_between(x, low, high, color=color, alpha=0.2, lw=0)
    if lengths:
        token_axis(axis, lengths, every=1 + len(lengths) // 6)


def main() -> None:
    for path in draw_all():
        print(f"wrote {path.relative_to(FIGURES.parent.parent)}")


if __name__ == "__main__":
    main()
