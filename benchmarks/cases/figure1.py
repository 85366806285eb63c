"""Figure 1 (right) of the M1 report: every marker, the formula it lies on, and the exact count.

    python -m benchmarks.run --case figure1        writes results/figure1.md and figures/figure1_right.svg

Nothing is timed: counts come from `minimax_hybrid.cost.published`, markers from the report's own drawing.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from minimax_hybrid.config import MiniMaxM1Config
from minimax_hybrid.cost.counts import generation_flops
from minimax_hybrid.cost.plotting import COLORS, INK, picture
from minimax_hybrid.cost.published import QWEN3, R1, R1_ABSORBED, figure_curves

from ..harness.pages import markdown
from ..harness.rows import ROOT, Row

ABOUT = "Figure 1 (right) of the M1 report: its markers, their formula, and the exact count; nothing is timed"
TESTS = ("tests/cost/test_published.py",)
MARKERS = ROOT / "tests" / "goldens" / "figure1_right.json"
_COLORS = {"DeepSeek R1": "softmax", "Qwen3-235B-A22B": "other", "MiniMax-M1": "hybrid"}
_ROUND = 100_000, 102_400


def markers() -> dict[str, list[tuple[int, float]]]:
    """The report's markers: tokens and FLOPs, as read from the drawing."""
    series = json.loads(MARKERS.read_text())["series"]
    return {
        name: [(point["gen_len_tokens"], point["flops_1e16"] * 1e16) for point in points]
        for name, points in series.items()
    }


def exact(name: str, T: int) -> int:
    """FLOPs of generating T tokens with the architecture as it is."""
    if name == "MiniMax-M1":
        return generation_flops(MiniMaxM1Config.m1(), T)
    return {"DeepSeek R1": R1, "Qwen3-235B-A22B": QWEN3}[name](T)


def run(options: argparse.Namespace) -> list[Row]:
    """No rows: the runner writes the page and the picture, which are counts."""
    return []


def draw(rows: list[Row], folder: Path) -> list[Path]:
    path = folder / "figure1_right.svg"
    curves, points = figure_curves(), markers()
    fine = range(1024, 131_073, 1024)
    thousands = [T / 1024 for T in fine]
    with picture(path, panels=2, height=3.8) as (left, right):
        for name, series in points.items():
            color = COLORS[_COLORS[name]]
            K, values = zip(*((T / 1024, y / 1e16) for T, y in series), strict=True)
            left.plot(K, values, "o", color=color, label=name)
            left.plot(thousands, [curves[name](T) / 1e16 for T in fine], color=color, lw=1.2)
            left.plot(thousands, [exact(name, T) / 1e16 for T in fine], "--", color=color, lw=1.2)
        left.plot([], [], "-", color=INK, lw=1.2, label="the figure's formula")
        left.plot([], [], "--", color=INK, lw=1.2, label="exact count")
        left.set_title("FLOPs of a generation, 1e16")
        for label, peer, color in (("DeepSeek R1", R1, "softmax"), ("Qwen3-235B-A22B", QWEN3, "other")):
            drawn = [curves["MiniMax-M1"](T) / curves[label](T) for T in fine]
            counted = [exact("MiniMax-M1", T) / peer(T) for T in fine]
            right.plot(thousands, drawn, color=COLORS[color], label=f"M1 / {label}, as drawn")
            right.plot(thousands, counted, "--", color=COLORS[color], label="the same, exact")
        right.set_title("M1 relative to the others")
        right.axhline(0.25, color=INK, lw=0.8)
        right.set_ylim(0, 2)
        for axis in (left, right):
            axis.set_xlabel("generated tokens, K (1,024)")
            axis.legend(fontsize=8.5)
    return [path]


def page() -> str:
    curves, points = figure_curves(), markers()
    m1, r1 = curves["MiniMax-M1"], curves["DeepSeek R1"]
    worst = max(abs(y - curves[name](T)) for name, series in points.items() for T, y in series)
    ratios = {T: (m1(T) / r1(T), exact("MiniMax-M1", T) / R1(T)) for T in (64_000, 65_536, *_ROUND)}
    absorbed = exact("MiniMax-M1", 102_400) / R1_ABSORBED(102_400)
    text = [
        "# Figure 1 (right): FLOPs of a generation",
        "",
        "Written by `python -m benchmarks.run --case figure1`; counts only, nothing was timed.",
        "",
        "![Figure 1 (right), reproduced](../figures/figure1_right.svg)",
        "",
        "Every marker of the report's figure lies on `linear * T + quadratic * T^2`, T in tokens, K = 1,024: "
        f"the largest distance is {worst:.1e} FLOPs, with markers read from the drawing to 1e9.",
        "",
        "| curve | linear | quadratic | where it departs from the model |",
        "|---|---:|---:|---|",
    ]
    text += [f"| {n} | {c.linear:,} | {c.quadratic:,} | {c.departs} |" for n, c in curves.items()]
    text += [
        "",
        "All three count queries times keys causally (half the square) but probabilities times values over "
        "the full square, and leave the routers out. The exact columns count both over the causal half, "
        "routers and head included, 70 lightning and 10 softmax layers for M1, 58 layers of experts and 3 "
        "dense ones for DeepSeek-R1 (attention as trained, not absorbed).",
        "",
        "## The claims",
        "",
        f'- "Less than 50 % of DeepSeek-R1 at 64K": {ratios[65_536][0]:.1%} at 65,536 tokens on the '
        f"figure's curve; {ratios[65_536][1]:.1%} by the exact count.",
        '- "About 25 % at 100K": the figure\'s own curve gives '
        f"**{ratios[102_400][0]:.1%} at 102,400 tokens** ({ratios[100_000][0]:.1%} at 100,000), and 25 % "
        f"only near {_reaches(m1, r1, 0.25):,} tokens. The exact count gives {ratios[102_400][1]:.1%} at "
        f"102,400, or {absorbed:.1%} if R1's attention is computed in its absorbed form, which saves memory "
        "and costs more FLOPs.",
        "",
        "## Every marker (1e16 FLOPs)",
        "",
    ]
    head = ["K"] + [f"{name}: {what}" for name in points for what in ("figure", "formula", "exact")]
    head += ["M1/R1 figure", "M1/R1 exact"]
    lines = []
    for i, (T, _) in enumerate(points["MiniMax-M1"]):
        cells = [f"{T // 1024}"]
        for name, series in points.items():
            assert series[i][0] == T
            cells += [f"{value / 1e16:.7f}" for value in (series[i][1], curves[name](T), exact(name, T))]
        cells += [f"{m1(T) / r1(T):.1%}", f"{exact('MiniMax-M1', T) / R1(T):.1%}"]
        lines.append(cells)
    return "\n".join([*text, markdown(head, lines, text=0)]) + "\n"


def _reaches(ours: Callable[[int], float], theirs: Callable[[int], float], ratio: float) -> int:
    """The first multiple of 1,024 tokens at which ours is at most `ratio` of theirs."""
    return next(T for T in range(1024, 2**21, 1024) if ours(T) <= ratio * theirs(T))
