"""The folder of a run: settings, log and checkpoints, which a kill at any moment cannot spoil.

A file is written whole or not at all, and a log that a kill cut short is cut back to the last checkpoint. A
checkpoint is a folder, written under another name and renamed when it is complete. It holds the model under
its published tensor names, so an inference engine can serve it as it is.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from transformers import PreTrainedModel

CHECKPOINTS_KEPT = 2


def record_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write the settings that make a run's numbers; a folder with a run of other settings is refused."""
    folder.mkdir(parents=True, exist_ok=True)
    record, settings = folder / "settings.json", json.loads(json.dumps(settings))
    if record.exists() and (was := json.loads(record.read_text())) != settings:
        changed = sorted(name for name in settings if was.get(name) != settings[name])
        raise ValueError(f"{folder} holds a run with another {' and '.join(changed)}; choose another output")
    _replace_text(record, json.dumps(settings, indent=1))


class Logs:
    """Appends to `log.jsonl`, and to TensorBoard if asked for.

    Every line has a `kind` (batch, update or evaluation) and the number of the `batch` it belongs to. A run
    that continues from batch `first`, after `step` optimiser steps, first removes what was logged beyond.
    """

    def __init__(self, folder: Path, *, first: int, step: int, tensorboard: bool):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "log.jsonl"
        if self.path.exists():
            kept = [line for line in read_log(self.path) if line["batch"] < first]
            _replace_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
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


def save_checkpoint(
    folder: Path,
    number: int,
    *,
    model: PreTrainedModel,
    tokenizer: Any,
    optimizer: Optimizer,
    state: dict[str, Any],
) -> Path:
    """Write `folder/000012` for number 12, unless it is there, and remove all but the newest two."""
    checkpoint = folder / f"{number:06d}"
    if checkpoint.exists():
        return checkpoint
    draft = folder / f"{number:06d}.draft"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    torch.save(optimizer.state_dict(), draft / "optimizer.pt")
    (draft / "trainer.json").write_text(json.dumps(state))
    draft.rename(checkpoint)
    for old in _complete_checkpoints(folder)[:-CHECKPOINTS_KEPT]:
        shutil.rmtree(old)
    return checkpoint


def newest_checkpoint(folder: Path) -> Path | None:
    """The last complete checkpoint; drafts of a run that was killed while writing are removed."""
    for draft in folder.glob("*.draft"):
        shutil.rmtree(draft)
    complete = _complete_checkpoints(folder)
    return complete[-1] if complete else None


def load_checkpoint(checkpoint: Path, *, model: PreTrainedModel, optimizer: Optimizer) -> dict[str, Any]:
    """Put weights and optimiser state back, bit for bit, and return the trainer's state."""
    device = next(model.parameters()).device
    saved = type(model).from_pretrained(checkpoint, dtype=torch.float32)
    model.load_state_dict(saved.state_dict())
    optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", map_location=device, weights_only=True))
    return json.loads((checkpoint / "trainer.json").read_text())


def _complete_checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[0-9]*") if path.suffix != ".draft")


def _replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text)
    draft.replace(path)
