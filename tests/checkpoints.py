"""Tensors of checkpoints on disk, for tests of loading and conversion."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from minimax_hybrid.checkpoint.headers import INDEX, SINGLE


def weights_in(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def save(folder: Path, tensors: dict[str, Tensor], *, shards: int = 1, config: Path | None = None) -> Path:
    """A folder with these tensors under these names, in one file or in shards with an index."""
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text((config / "config.json").read_text())
    if shards == 1:
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        return folder
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(tensors)}
    for shard in set(weight_map.values()):
        part = {name: tensor for name, tensor in tensors.items() if weight_map[name] == shard}
        save_file(part, folder / shard, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def assert_same_weights(found: nn.Module, expected: nn.Module) -> None:
    theirs = expected.state_dict()
    assert found.state_dict().keys() == theirs.keys()
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor.float(), theirs[name].float()), name
