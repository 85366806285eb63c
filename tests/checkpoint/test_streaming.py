"""What leaves for an inference engine has the published names, all of them, and the policy's values."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny import letters

from minimax_hybrid.checkpoint.loading import published_shapes
from minimax_hybrid.checkpoint.streaming import published_weights


def test_streamed_and_saved_weights_have_every_published_name_and_one_value(tmp_path: Path) -> None:
    model = letters(layers=3)
    streamed = dict(published_weights(model))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert set(streamed) == set(saved) == set(published_shapes(model))
    for name, value in saved.items():
        assert torch.equal(streamed[name], value), name


def test_a_bfloat16_copy_keeps_its_routers_in_float32() -> None:
    for name, value in published_weights(letters(), dtype=torch.bfloat16):
        assert value.dtype == (torch.float32 if name.endswith("moe.gate.weight") else torch.bfloat16), name
