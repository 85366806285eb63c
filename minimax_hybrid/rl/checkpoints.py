"""Checkpoints that a kill at any moment cannot spoil.

A checkpoint is a folder, written beside its place under a name that nobody reads and renamed when it is
whole. It holds the model under its published tensor names, so an inference engine can serve it as it is.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from transformers import PreTrainedModel

KEPT = 2


def save_checkpoint(
    folder: Path,
    number: int,
    *,
    model: PreTrainedModel,
    tokenizer: Any,
    optimizer: Optimizer,
    state: dict[str, Any],
) -> Path:
    """Write `folder/000012` for number 12, unless it is there, and remove all but the newest KEPT."""
    place = folder / f"{number:06d}"
    if place.exists():
        return place
    draft = folder / f"{number:06d}.draft"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    torch.save(optimizer.state_dict(), draft / "optimizer.pt")
    (draft / "trainer.json").write_text(json.dumps(state))
    draft.rename(place)
    for old in _whole(folder)[:-KEPT]:
        shutil.rmtree(old)
    return place


def newest_checkpoint(folder: Path) -> Path | None:
    """The last whole checkpoint; drafts of a run that was killed while writing are removed."""
    for draft in folder.glob("*.draft"):
        shutil.rmtree(draft)
    whole = _whole(folder)
    return whole[-1] if whole else None


def load_checkpoint(place: Path, *, model: PreTrainedModel, optimizer: Optimizer) -> dict[str, Any]:
    """Put weights and optimiser state back, bit for bit, and return the trainer's state."""
    device = next(model.parameters()).device
    saved = type(model).from_pretrained(place, dtype=torch.float32)
    model.load_state_dict(saved.state_dict())
    optimizer.load_state_dict(torch.load(place / "optimizer.pt", map_location=device, weights_only=True))
    return json.loads((place / "trainer.json").read_text())


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text)
    draft.replace(path)


def _whole(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[0-9]*") if path.suffix != ".draft")
