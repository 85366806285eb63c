"""Figure 1 (right) of the M1 report: every marker, the formula it lies on, and the exact count.

    python -m benchmarks.run --case figure1        writes results/figure1.md and figures/figure1_right.svg

Nothing is timed: counts come from `minimax_hybrid.cost.published`, markers from the report's own drawing.
"""

import argparse
import json
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
        right.axhline(0.25, color=INK, lw=0.8)
        right.set(title="M1 relative to the others", ylim=(0, 2))
        for axis in (left, right):
            axis.set_xlabel("generated tokens, K (1,024)")
            axis.legend(fontsize=8.5)
    return [path]


def page() -> str:
    """The text of `figure1.md` beside this file, with its numbers and tables."""
    curves, points = figure_curves(), markers()
    m1, r1 = curves["MiniMax-M1"], curves["DeepSeek R1"]
    lengths = [T for T, _ in points["MiniMax-M1"]]
    drawn = {T: m1(T) / r1(T) for T in (*lengths, 65_536, 100_000, 102_400)}
    counted = {T: exact("MiniMax-M1", T) / R1(T) for T in drawn}
    head = ["K", *(f"{name}: {what}" for name in points for what in ("figure", "formula", "exact"))]
    head += ["M1/R1 figure", "M1/R1 exact"]
    lines = []
    for i, T in enumerate(lengths):
        flops = [x for name, of in points.items() for x in (of[i][1], curves[name](T), exact(name, T))]
        ratios = [f"{ratio[T]:.1%}" for ratio in (drawn, counted)]
        lines.append([f"{T // 1024}", *(f"{x / 1e16:.7f}" for x in flops), *ratios])
    formulas = [f"| {n} | {c.linear:,} | {c.quadratic:,} | {c.departs} |" for n, c in curves.items()]
    template = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    return template.format(
        distance=max(abs(y - curves[name](T)) for name, of in points.items() for T, y in of),
        formulas="\n".join(formulas),
        drawn=drawn,
        exact=counted,
        quarter=next(T for T in range(1024, 2**21, 1024) if m1(T) <= 0.25 * r1(T)),
        absorbed=exact("MiniMax-M1", 102_400) / R1_ABSORBED(102_400),
        markers=markdown(head, lines, text=0),
    )
