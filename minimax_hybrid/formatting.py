"""Numbers as people read them: tokens, bytes, tables for a terminal."""

from collections.abc import Sequence


def tokens(count: float) -> str:
    """A length as people say it: 512, 64K, 1M (K = 1,024)."""
    count = round(count)
    for unit, name in ((1024**2, "M"), (1024, "K")):
        if count >= unit and count % unit == 0:
            return f"{count // unit}{name}"
    return f"{count:,}"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns under their heads, the first to the left and the others to the right."""
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    first, *others = widths
    return "\n".join(
        "  ".join([line[0].ljust(first), *(cell.rjust(w) for cell, w in zip(line[1:], others, strict=True))])
        for line in (head, ["-" * width for width in widths], *lines)
    )


def byte_text(count: float) -> str:
    """Bytes as people say them: 293.6 MB (decimal units)."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
