"""Convert a checkpoint folder between its published layouts: bytes are moved, no number is computed.

    "minimax_m1", "minimax_text_01"     the releases: every expert's w1, w2, w3 apart
    "minimax"                           transformers' own class: experts stacked, under `mlp`

A stacked tensor is its parts' bytes one after the other (`headers.py`), so a shard is written from slices
of the source's files in bounded memory, whatever the model's size. The target appears whole or not at all.
"""

import json
import os
import shutil
import struct
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..config import MiniMaxM1Config, to_transformers
from ..model import MiniMaxM1ForCausalLM, MiniMaxM1Model
from .headers import (
    INDEX,
    ITEM_BYTES,
    LAYOUTS,
    SINGLE,
    TensorInfo,
    is_derived,
    parts_of,
    published_name,
    read_headers,
)
from .loading import compare, main_dtype, model_on_meta

_CLASSES = {"minimax_m1": "MiniMaxM1", "minimax_text_01": "MiniMaxText01", "minimax": "MiniMax"}
_SHARD_BYTES = 5_000_000_000
_CHUNK_BYTES = 16 << 20
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".py")


@dataclass(frozen=True)
class _Output:
    """A tensor to write, and the slices of source files (name, first byte, bytes) that it consists of."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    slices: tuple[tuple[str, int, int], ...]

    @property
    def bytes(self) -> int:
        return sum(length for _, _, length in self.slices)


def convert(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    layout: str,
    max_shard_bytes: int = _SHARD_BYTES,
) -> list[str]:
    """Write the checkpoint in `source` to the new folder `target` in another layout, tensors bit for bit.

    The configuration is spelled as the layout's; the tokenizer's and all other files are copied, except
    weights of other formats and code.

    Returns:
        what the user should know: where transformers' own class computes another model (also as warnings).

    Raises:
        ValueError: an unknown layout, a target that is not empty, weights that do not fit their config.
        FileNotFoundError: a source without config or weights.
    """
    source, target = Path(source), Path(target)
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; choose one of {', '.join(LAYOUTS)}")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; it must be at least 1")
    _check_target(target)
    if not (source / "config.json").is_file():
        raise FileNotFoundError(f"{source} holds no config.json; give the folder of a checkpoint")
    config = MiniMaxM1Config.from_pretrained(source)
    tensors = read_headers(source)
    whole = any(name.startswith("model.") for name in tensors)
    model = model_on_meta(MiniMaxM1ForCausalLM if whole else MiniMaxM1Model, config)
    difference = compare(tensors, model)
    if difference:
        wrong = difference.describe(tensors)
        raise ValueError(f"{source} does not hold the weights of its config:\n  {wrong}")
    outputs = list(_outputs(tensors, model, stacked=layout == "minimax"))
    notes = _differences(config) if layout == "minimax" else []
    for note in notes:
        warnings.warn(note, stacklevel=2)
    _write_folder(source, target, outputs, _config_fields(config, tensors, layout, whole), max_shard_bytes)
    return notes


def _outputs(tensors: dict[str, TensorInfo], model: Any, *, stacked: bool) -> Iterator[_Output]:
    """Every tensor of the target, in the model's order."""
    found = {published_name(disk): tensor for disk, tensor in tensors.items() if not is_derived(disk)}
    for ours, weight in model.state_dict().items():
        parts = parts_of(ours, tuple(weight.shape))
        if ours in found:
            whole = found[ours]
            size = whole.bytes // len(parts)
            pieces = [(whole.file, whole.start + i * size, size) for i in range(len(parts))]
            dtypes = {whole.dtype}
        elif all(part in found for part in parts):
            pieces = [(found[part].file, found[part].start, found[part].bytes) for part in parts]
            dtypes = {found[part].dtype for part in parts}
        else:
            continue  # tied to one that is there
        if not stacked:
            for (part, shape), piece in zip(parts.items(), pieces, strict=True):
                yield _Output(part, found[part].dtype if part in found else min(dtypes), shape, (piece,))
            continue
        if len(dtypes) > 1:
            raise ValueError(f"the experts of {ours} have types {sorted(dtypes)}; a stack has one")
        theirs = ours.replace(".block_sparse_moe.", ".mlp.")
        yield _Output(theirs, min(dtypes), tuple(weight.shape), tuple(pieces))


def _differences(config: MiniMaxM1Config) -> list[str]:
    """Where transformers' own class computes something else from the same weights."""
    H, D, turning = config.num_attention_heads, config.head_dim, config.rotary_dim
    reasons = (
        (turning != D, f"it rotates all {D} dimensions of a head, this model the first {turning}"),
        (H & (H - 1) != 0, f"its decay is wrong for {H} heads, which is not a power of two"),
        (not config.postnorm, "it takes the normed input as residual, and postnorm is false here"),
        (config.shared_intermediate_size > 0, "it has no shared expert"),
    )
    return [
        f"transformers' MiniMaxForCausalLM computes another model from these weights: {reason}"
        for applies, reason in reasons
        if applies
    ]


def _config_fields(
    config: MiniMaxM1Config, tensors: dict[str, TensorInfo], layout: str, whole: bool
) -> dict[str, Any]:
    if config.dtype is None:
        config.dtype = main_dtype(tensors)
    fields = to_transformers(config) if layout == "minimax" else config.to_diff_dict()
    ending = "ForCausalLM" if whole else "Model"
    return fields | {"model_type": layout, "architectures": [_CLASSES[layout] + ending]}


def _check_target(target: Path) -> None:
    if target.is_dir():
        if any(target.iterdir()):
            raise ValueError(f"{target} is not empty; name a folder that does not exist yet")
    elif target.exists():
        raise ValueError(f"{target} is a file; name a folder that does not exist yet")


def _write_folder(
    source: Path, target: Path, outputs: list[_Output], fields: dict[str, Any], max_shard_bytes: int
) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    needed, free = sum(output.bytes for output in outputs), shutil.disk_usage(target.parent).free
    if needed > free:
        raise ValueError(f"{target.parent} has {free} bytes left and the weights take {needed}")
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        for file in sorted(source.iterdir()):
            if file.is_file() and file.name != "config.json" and not file.name.endswith(_NOT_COPIED):
                shutil.copyfile(file, scratch / file.name)
        _write_shards(source, scratch, outputs, max_shard_bytes)
        text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
        (scratch / "config.json").write_text(text, encoding="utf-8")
        scratch.chmod(0o755)
        if target.is_dir():
            target.rmdir()
        scratch.rename(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _write_shards(source: Path, folder: Path, outputs: list[_Output], max_shard_bytes: int) -> None:
    shards: list[list[_Output]] = []
    room = 0
    for output in outputs:
        if not shards or output.bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(output)
        room -= output.bytes
    if len(shards) == 1:
        _write_shard(source, folder / SINGLE, shards[0])
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(source, folder / file, shard)
        weight_map |= {output.name: file for output in shard}
    index = {"metadata": {"total_size": sum(output.bytes for output in outputs)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_shard(source: Path, path: Path, outputs: list[_Output]) -> None:
    # widest type first, so that every tensor begins at a multiple of its type's width
    outputs = sorted(outputs, key=lambda output: (-ITEM_BYTES.get(output.dtype, 1), output.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for output in outputs:
        start, end = end, end + output.bytes
        header[output.name] = {"dtype": output.dtype, "shape": output.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for output in outputs:
            for file, start, length in output.slices:
                with (source / file).open("rb") as piece:
                    piece.seek(start)
                    _copy(piece, out, length)


def _copy(piece: BinaryIO, out: BinaryIO, length: int) -> None:
    while length:
        block = piece.read(min(length, _CHUNK_BYTES))
        if not block:
            raise ValueError(f"{piece.name} ended {length} bytes early; was it changed meanwhile?")
        out.write(block)
        length -= len(block)
