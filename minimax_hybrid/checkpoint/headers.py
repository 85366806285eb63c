"""A checkpoint folder: which tensors lie in which file, known from the headers alone, and their two layouts.

The release stores every expert's `w1`, `w2`, `w3` apart; transformers' `minimax` stacks them, under `mlp`. In
memory we stack as well: `gate_up_proj` (E, 2F, M) holds w1 over w3 of each expert, `down_proj` (E, M, F) its
w2. A stacked tensor is therefore the bytes of its parts, one after the other, in the order of `parts_of`.

    a safetensors file:  length of the header, 8 bytes | header, JSON | the tensors' bytes
"""

import json
import math
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

LAYOUTS = ("minimax_m1", "minimax_text_01", "minimax")  # the model types of the releases, and transformers'
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # every type that weights of this model have
_STACKED = re.compile(r"^(.*)\.block_sparse_moe\.experts\.(gate_up_proj|down_proj)$")
_PART = re.compile(r"^(.*\.block_sparse_moe\.experts)\.(\d+)\.(w1|w2|w3)\.weight$")
# transformers' own class saves its decay tables; ours computes them
DERIVED = r"\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint, as its shard's header describes it; `start` is its first byte there."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    bytes: int


def read_headers(folder: str | os.PathLike, *, variant: str | None = None) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint folder by its name on disk, from the headers of its shards.

    Raises:
        FileNotFoundError: no weights, or a shard of the index that is not there.
        ValueError: a file that is damaged, or an index that contradicts its shards.
    """
    folder = Path(folder)
    single, index = ((folder / with_variant(name, variant)) for name in (SINGLE, INDEX))
    if single.is_file() and index.is_file():
        raise ValueError(f"{folder} holds {single.name} and {index.name}: two sets of weights; remove one")
    if not single.is_file() and not index.is_file():
        raise FileNotFoundError(f"{folder} holds no weights: neither {single.name} nor {index.name} is there")
    if single.is_file():
        return _read_header(single)
    weight_map = _read_index(index)
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise FileNotFoundError(f"{index} names shards that are not there: {', '.join(absent)}")
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, tensor in _read_header(folder / shard).items():
            if name in tensors:
                raise ValueError(f"{name} is in {tensors[name].file} and in {shard}; a tensor has one place")
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file != shard:
            raise ValueError(f"{index} places {name} in {shard}, which does not hold it")
    return tensors


def with_variant(name: str, variant: str | None) -> str:
    """`model.fp16.safetensors` for the variant fp16, `model.safetensors.index.fp16.json` for its index."""
    stem, ending = name.rsplit(".", 1)
    return name if variant is None else f"{stem}.{variant}.{ending}"


def published_name(name: str) -> str:
    """A name on disk with the release's module names; stacked experts stay stacked."""
    return name.replace(".mlp.", ".block_sparse_moe.")


def is_derived(name: str) -> bool:
    """Whether a tensor on disk is no weight but a table that follows from the config."""
    return re.search(DERIVED, name) is not None


def parts_of(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The published tensors that one of ours is made of, with their shapes, in the order of its bytes."""
    stacked = _STACKED.match(name)
    if not stacked:
        return {name: shape}
    E, outputs, inputs = shape
    parts, outputs = (("w1", "w3"), outputs // 2) if stacked[2] == "gate_up_proj" else (("w2",), outputs)
    return {
        f"{stacked[1]}.block_sparse_moe.experts.{e}.{part}.weight": (outputs, inputs)
        for e in range(E)
        for part in parts
    }


def stacked_place(part: str) -> tuple[str, int, str] | None:
    """Where a published tensor goes: our stacked name, the expert's number and `w1`, `w2` or `w3`."""
    match = _PART.match(part)
    if not match:
        return None
    return f"{match[1]}.{'down_proj' if match[3] == 'w2' else 'gate_up_proj'}", int(match[2]), match[3]


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        if not weight_map or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError("its weight_map must give a file name for each tensor")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no index of shards ({error}); download it again") from error
    return weight_map


def _read_header(path: Path) -> dict[str, TensorInfo]:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                raise ValueError(f"its header claims {length} bytes and the file has {size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {
            name: TensorInfo(
                path.name, entry["dtype"], tuple(entry["shape"]), 8 + length + start, end - start
            )
            for name, entry in header.items()
            for start, end in [entry["data_offsets"]]
        }
        for name, tensor in tensors.items():
            expected = ITEM_BYTES.get(tensor.dtype, 0) * math.prod(tensor.shape)
            if expected and tensor.bytes != expected:
                raise ValueError(f"{name} takes {tensor.bytes} bytes where its shape needs {expected}")
        end = 8 + length + sum(tensor.bytes for tensor in tensors.values())
        if end != size:
            raise ValueError(f"its header speaks of {end} bytes and the file has {size}")
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}; download it again") from error
    return tensors
