"""One look for every picture: transparent ground, grey and middle tones that hold on white and on black."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INK = "#767d86"  # contrast 4.2 on white, 4.5 on GitHub's dark ground
COLORS = {"hybrid": "#3b82c4", "softmax": "#d9822b", "lightning": "#2f9e6e", "other": "#a06cd5"}
_STYLE = {
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


def tokens(count: float) -> str:
    """A length as people say it: 512, 64K, 1M (K = 1,024)."""
    count = round(count)
    for unit, name in ((1024**2, "M"), (1024, "K")):
        if count >= unit and count % unit == 0:
            return f"{count // unit}{name}"
    return f"{count:,}"


def token_axis(axis: Any, lengths: list[int], *, every: int = 1) -> None:
    """A logarithmic x axis whose ticks are the lengths themselves."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths[::every], [tokens(n) for n in lengths[::every]])
    axis.xaxis.minorticks_off()
