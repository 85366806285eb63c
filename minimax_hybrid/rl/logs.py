"""Where a run writes its numbers: JSON lines, and TensorBoard if asked for.

Every line has a `kind` (batch, update or evaluation) and the number of the `batch` it belongs to.
"""

import json
from pathlib import Path
from typing import Any

from .checkpoints import replace_text


class Logs:
    """Appends to `log.jsonl`. Going on from batch `first`, after `step` optimiser steps, what a killed run
    logged beyond them is removed first."""

    def __init__(self, folder: Path, *, first: int, step: int, tensorboard: bool):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "log.jsonl"
        if self.path.exists():
            kept = [line for line in read_log(self.path) if line["batch"] < first]
            replace_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self._writer = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ValueError(
                    "tensorboard = true needs the package tensorboard: pip install tensorboard"
                ) from error
            self._writer = SummaryWriter(folder / "tensorboard", purge_step=step + 1)

    def write(self, kind: str, batch: int, *, step: int, values: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, "batch": batch, "step": step, **values}) + "\n")
        if self._writer is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; a last line that a kill cut short is left out."""
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]
