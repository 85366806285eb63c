"""One look for every picture: transparent ground, grey and middle tones that hold on white and on black."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..formatting import tokens

INK = "#767d86"  # contrast 4.2 on white, 4.5 on GitHub's dark ground
COLORS = {"hybrid": "#3b82c4", "softmax": "#d9822b", "lightning": "#2f9e6e", "other": "#a06cd5"}
_STYLE: Any = {
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.titlecolor": INK, "legend.labelcolor": INK,
    "grid.color": INK, "grid.alpha": 0.25, "grid.linewidth": 0.6,
    "axes.grid": True, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "font.size": 10, "axes.titlesize": 11, "lines.linewidth": 2, "lines.markersize": 5,
    "svg.hashsalt": "minimax-hybrid",
}  # fmt: skip


@contextmanager
def picture(path: Path | str, *, panels: int = 1, height: float = 3.6) -> Iterator[list[Any]]:
    """The axes of a row of panels; leaving the block writes them to `path` (its ending sets the format)."""
    try:
        import matplotlib
    except ImportError as missing:
        raise ValueError("drawing needs matplotlib: pip install 'minimax-hybrid[bench]'") from missing
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(_STYLE):
        figure, axes = pyplot.subplots(1, panels, figsize=(4.6 * panels, height), squeeze=False)
        try:
            yield list(axes[0])
            figure.tight_layout()
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            metadata = {"Date": None} if str(path).endswith(".svg") else {}
            figure.savefig(path, metadata=metadata, dpi=150)
        finally:
            pyplot.close(figure)


def token_axis(axis: Any, lengths: list[int], *, every: int = 1) -> None:
    """A logarithmic x axis whose ticks are the lengths themselves."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths[::every], [tokens(n) for n in lengths[::every]])
    axis.xaxis.minorticks_off()


def cost_plot(report: dict[str, Any], path: Path | str) -> None:
    """Draw the report: per token and cache against the twin, or generation against a peer."""
    lengths = [at["length"] for at in report["lengths"]]
    if report["against"] == "softmax":
        with picture(path, panels=2) as (left, right):
            for name, entries in (
                ("hybrid", report["lengths"]),
                ("softmax", [at["against"] for at in report["lengths"]]),
            ):
                label = name if name == "hybrid" else "softmax twin"
                decode = [at["flops_per_token"]["decode"]["total"] for at in entries]
                cache = [at["cache_bytes"]["total"] / 1e9 for at in entries]
                left.plot(lengths, decode, color=COLORS[name], label=label)
                right.plot(lengths, cache, color=COLORS[name], label=label)
            left.set_title("FLOPs of one decoded token")
            right.set_title(f"cache of one sequence, GB ({report['dtype']})")
            for axis in (left, right):
                token_axis(axis, lengths, every=2)
                axis.set_yscale("log")
                axis.set_xlabel("context, tokens")
                axis.legend()
        return
    with picture(path) as (axis,):
        axis.plot(lengths, [at["generation_flops"] for at in report["lengths"]], color=COLORS["hybrid"],
                  label="this model")  # fmt: skip
        shades = (COLORS["softmax"], COLORS["other"])
        for name, color in zip(report["lengths"][0]["against"]["generation_flops"], shades, strict=False):
            values = [at["against"]["generation_flops"][name] for at in report["lengths"]]
            axis.plot(lengths, values, color=color, label=name)
        token_axis(axis, lengths, every=2)
        axis.set_yscale("log")
        axis.set_title("FLOPs of a generation, exact counts")
        axis.set_xlabel("generated tokens")
        axis.legend()
