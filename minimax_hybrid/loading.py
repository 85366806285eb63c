"""Published checkpoints: what must be in them, what is, and how their names become ours.

Two layouts exist on disk. The release stores every expert's `w1`, `w2`, `w3` apart; transformers' `minimax`
stores them stacked, under `mlp`. Both are read, the first is written. In memory experts are stacked:
`gate_up_proj` (E, 2F, M) holds w1 over w3, `down_proj` (E, M, F) is w2. transformers converts shard by shard
while it loads, so a model is never held twice; what it would load is checked first, from the shards' headers
alone.
"""

import json
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_STACKED = re.compile(r"^(.*)\.block_sparse_moe\.experts\.(gate_up_proj|down_proj)$")
# transformers' own class saves its decay tables; ours computes them
_DERIVED = re.compile(r"\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$")


@dataclass
class Tensor:
    """One tensor of a checkpoint, as its shard's header describes it."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass
class Mismatch:
    """How a checkpoint differs from the model it is for; names are the published ones."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def describe(self, tensors: dict[str, Tensor]) -> str:
        lines = [f"missing: {name}" for name in self.missing]
        lines += [f"unexpected: {name} (in {tensors[name].file})" for name in self.unexpected]
        lines += [
            f"shape: {name} (in {tensors[name].file}) is {found}, the config asks for {wanted}"
            for name, found, wanted in self.mismatched
        ]
        shown = lines[:20] + ([f"... and {len(lines) - 20} more"] if len(lines) > 20 else [])
        return "\n  ".join(shown)


def register_layouts(*model_types: str) -> None:
    """Tell transformers how experts are stacked on loading and taken apart on saving."""
    for model_type in model_types:
        register_checkpoint_conversion_mapping(
            model_type,
            [
                WeightConverter(
                    [".experts.*.w1.weight", ".experts.*.w3.weight"],
                    ".experts.gate_up_proj",
                    [MergeModulelist(dim=0), Concatenate(dim=1)],
                ),
                WeightConverter(".experts.*.w2.weight", ".experts.down_proj", [MergeModulelist(dim=0)]),
            ],
            overwrite=True,
        )


def load(
    cls: type,
    from_pretrained: Callable[..., Any],
    path: str | os.PathLike,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    strict: bool,
) -> Any:
    """Check the folder, then let `from_pretrained` load it; see `HybridPreTrainedModel.from_pretrained`."""
    wants_info = kwargs.pop("output_loading_info", False)
    folder, tensors = _weights_folder(path), {}
    difference = Mismatch()
    if folder is not None and kwargs.get("state_dict") is None:
        tensors = read_headers(folder)
        config = kwargs.get("config")
        if config is None:
            config = cls.config_class.from_pretrained(folder)
        difference = compare(tensors, model_on_meta(cls, config))
        if strict and difference:
            raise ValueError(
                f"{folder} does not hold the weights of this config (strict=False loads what fits):\n  "
                + difference.describe(tensors)
            )
        if any(".mlp." in name for name in tensors):
            kwargs.setdefault("key_mapping", {r"\.mlp\.": ".block_sparse_moe."})
    if not strict:
        kwargs.setdefault("ignore_mismatched_sizes", True)
    model, info = from_pretrained(path, *args, output_loading_info=True, **kwargs)
    if folder is None and strict:
        _refuse(info, path)
    # what is saved has the published names, whichever layout was read
    if hasattr(model, "_weight_conversions"):
        del model._weight_conversions
    if not wants_info:
        return model
    if difference:
        info["missing_keys"] = set(difference.missing)
        info["unexpected_keys"] = set(difference.unexpected)
        info["mismatched_keys"] = set(difference.mismatched)
    return model, info


def read_headers(folder: str | os.PathLike) -> dict[str, Tensor]:
    """Every tensor of a checkpoint folder by its name on disk, from the headers of its shards.

    Raises:
        FileNotFoundError: no weights, or a shard of the index that is not there.
        ValueError: a file that is damaged, or an index that contradicts its shards.
    """
    folder = Path(folder)
    if (folder / INDEX).is_file():
        weight_map = _read_index(folder / INDEX)
        shards = sorted(set(weight_map.values()))
    elif (folder / SINGLE).is_file():
        weight_map, shards = None, [SINGLE]
    else:
        raise FileNotFoundError(f"{folder} holds no weights: neither {SINGLE} nor {INDEX} is there")
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise FileNotFoundError(f"{folder / INDEX} names shards that are not there: {', '.join(absent)}")
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        for name, tensor in _read_header(folder / shard).items():
            if name in tensors:
                raise ValueError(f"{name} is in {tensors[name].file} and in {shard}; a tensor has one place")
            tensors[name] = tensor
    for name, shard in (weight_map or {}).items():
        if name not in tensors or tensors[name].file != shard:
            raise ValueError(f"{folder / INDEX} places {name} in {shard}, which does not hold it")
    return tensors


def model_on_meta(cls: type, config: Any) -> nn.Module:
    """The model without memory for its weights: names and shapes only."""
    with torch.device("meta"):
        return cls(config)


def published_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that `save_pretrained` writes: experts apart, a tied head left out."""
    tied = getattr(model, "all_tied_weights_keys", {})
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        if name not in tied:
            shapes |= _apart(name, tuple(tensor.shape))
    return shapes


def compare(tensors: dict[str, Tensor], model: nn.Module) -> Mismatch:
    """What of a checkpoint does not fit a model; its base model's names and both layouts of experts are
    legal."""
    found = {_our_name(name): name for name in tensors if not _DERIVED.search(name)}
    prefix = model.base_model_prefix + "."
    is_base = not hasattr(model, model.base_model_prefix)
    if is_base and any(name.startswith(prefix) for name in found):
        # the checkpoint is of the whole language model: only its base is asked for
        found = {name.removeprefix(prefix): disk for name, disk in found.items() if name.startswith(prefix)}
    difference = Mismatch()
    used = set()
    tied = getattr(model, "all_tied_weights_keys", {})
    for name, tensor in model.state_dict().items():
        wanted = _apart(name, tuple(tensor.shape))
        if name in found:
            wanted = {name: tuple(tensor.shape)}
        for part, shape in wanted.items():
            if part not in found:
                if name not in tied:
                    difference.missing.append(part)
                continue
            used.add(part)
            if tensors[found[part]].shape != shape:
                difference.mismatched.append((found[part], tensors[found[part]].shape, shape))
    difference.unexpected = [disk for name, disk in found.items() if name not in used]
    return difference


def _our_name(name: str) -> str:
    return name.replace(".mlp.", ".block_sparse_moe.")


def _apart(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The published tensors that one of ours is made of: (E, 2F, M) is E times w1 and w3, (E, M, F) E times
    w2."""
    stacked = _STACKED.match(name)
    if not stacked:
        return {name: shape}
    E, rows, columns = shape
    parts, rows = (("w1", "w3"), rows // 2) if stacked[2] == "gate_up_proj" else (("w2",), rows)
    return {
        f"{stacked[1]}.block_sparse_moe.experts.{e}.{part}.weight": (rows, columns)
        for e in range(E)
        for part in parts
    }


def _weights_folder(path: str | os.PathLike) -> Path | None:
    """The local folder whose weights will be loaded; None if they come from elsewhere."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    adapter = folder / "adapter_config.json"
    if adapter.is_file() and not any((folder / name).is_file() for name in (SINGLE, INDEX)):
        base = json.loads(adapter.read_text())["base_model_name_or_path"]
        return Path(base) if Path(base).is_dir() else None
    return folder


def _read_index(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no index of shards ({error}); download it again") from error


def _read_header(path: Path) -> dict[str, Tensor]:
    """A safetensors file begins with the length of a JSON header, which gives each tensor's type, shape and
    place."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                raise ValueError(f"its header claims {length} bytes and the file has {size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {
            name: Tensor(path.name, entry["dtype"], tuple(entry["shape"]), end - start)
            for name, entry in header.items()
            for start, end in [entry["data_offsets"]]
        }
        end = 8 + length + sum(tensor.bytes for tensor in tensors.values())
        if end != size:
            raise ValueError(f"its header speaks of {end} bytes and the file has {size}")
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}; download it again") from error
    return tensors


def _refuse(info: dict[str, Any], path: str | os.PathLike) -> None:
    wrong = {name: sorted(map(str, info[f"{name}_keys"])) for name in ("missing", "unexpected", "mismatched")}
    if any(wrong.values()):
        raise ValueError(
            f"{path} does not hold the weights of its config (strict=False loads what fits): {wrong}"
        )
