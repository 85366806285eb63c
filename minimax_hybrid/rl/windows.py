"""The staged output window of the report's section 5: 40K, 48K, 56K, 64K, 72K, 80K, one after the other.

The report's indicators for moving on include that the perplexity of the generations has converged and that
the 99th percentile of their lengths approaches the window. It gives no thresholds, nor says whether one
indicator is enough; here both must hold, and the defaults are ours.
"""

from dataclasses import dataclass, field


@dataclass
class StagedWindow:
    """The window in force, and what it has seen since it came into force.

    Args:
        sizes: windows in tokens, growing.
        patience: batches over which perplexity is compared.
        perplexity_change: converged when it moved by less than this, relatively, over the last `patience`
            batches.
        near: the 99th percentile of lengths approaches the window from this share of it on.
    """

    sizes: tuple[int, ...]
    patience: int = 5
    perplexity_change: float = 0.05
    near: float = 0.9
    stage: int = 0
    perplexities: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.sizes or self.sizes[0] < 1 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"windows must be positive and grow, got {list(self.sizes)}")

    @property
    def size(self) -> int:
        return self.sizes[self.stage]

    def observe(self, *, perplexity: float, length_p99: float) -> dict[str, float]:
        """Enter one batch, move on if both indicators say so, and return what to log."""
        self.perplexities = [*self.perplexities[-self.patience :], perplexity]
        span = max(self.perplexities) - min(self.perplexities)
        converged = len(self.perplexities) > self.patience and span <= self.perplexity_change * perplexity
        near = length_p99 >= self.near * self.size
        report = {"window": self.size, "window_converged": float(converged), "window_near": float(near)}
        if converged and near and self.stage + 1 < len(self.sizes):
            self.stage, self.perplexities = self.stage + 1, []
        return report
