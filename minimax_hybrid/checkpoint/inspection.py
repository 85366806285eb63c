"""What a checkpoint folder holds and needs, from its config and the headers of its shards: no weight is read.

report = inspect_report(folder)         plain numbers, ready for json.dumps
print(inspect_text(report))
report["fits"]                          False if a tensor is missing, left over or of another shape
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from ..config import LIGHTNING, MiniMaxM1Config, read_config
from ..cost.counts import cache_bytes, inference_bytes, parameters
from ..formatting import byte_text, table, tokens
from ..model import MiniMaxM1ForCausalLM
from .headers import read_headers
from .loading import compare, main_dtype, model_on_meta

LENGTHS = (4 * 1024, 128 * 1024, 1024 * 1024)


def inspect_report(folder: str | Path) -> dict[str, Any]:
    """Layers, parameters, types, tensors that do not fit, and the memory that inference needs.

    Raises:
        ValueError: a folder that does not describe such a model.
    """
    config = read_config(folder)
    counts = parameters(config)
    weights = _weights(Path(folder), config)
    dtype = weights.get("main_dtype", "bfloat16")
    return {
        "folder": str(folder),
        "model_type": json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["model_type"],
        "layers": ["lightning" if kind == LIGHTNING else "softmax" for kind in config.attn_type_list],
        "sizes": {
            name: getattr(config, name)
            for name in (
                "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                "rotary_dim", "num_local_experts", "num_experts_per_tok", "shared_intermediate_size",
                "vocab_size", "max_position_embeddings",
            )
        },
        "parameters": {
            "total": counts.total,
            "active": counts.active,
            "active_with_embedding_and_head": counts.active_with_embedding,
        },
        "weights": weights,
        "fits": not any(weights.get(name) for name in ("error", "missing", "unexpected", "mismatched")),
        "inference_dtype": dtype,
        "inference_bytes": {
            str(n): {
                "cache": cache_bytes(config, n, dtype=dtype).total,
                "total": inference_bytes(config, n, dtype=dtype),
            }
            for n in LENGTHS
        },
    }  # fmt: skip


def _weights(folder: Path, config: MiniMaxM1Config) -> dict[str, Any]:
    """The tensors on disk and how they differ from those of the config; `error` if they cannot be read."""
    try:
        tensors = read_headers(folder)
    except (OSError, ValueError) as error:
        return {"error": str(error)}
    difference = compare(tensors, model_on_meta(MiniMaxM1ForCausalLM, config))
    by_dtype: Counter[str] = Counter()
    for tensor in tensors.values():
        by_dtype[tensor.dtype] += tensor.bytes
    main = main_dtype(tensors)
    return {
        "files": len({tensor.file for tensor in tensors.values()}),
        "tensors": len(tensors),
        "bytes": sum(by_dtype.values()),
        "bytes_by_dtype": dict(by_dtype.most_common()),
        "main_dtype": str(main or torch.bfloat16).removeprefix("torch."),
        "missing": difference.missing,
        "unexpected": [{"name": name, "file": tensors[name].file} for name in difference.unexpected],
        "mismatched": [
            {"name": name, "file": tensors[name].file, "found": list(found), "wanted": list(wanted)}
            for name, found, wanted in difference.mismatched
        ],
    }


def inspect_text(report: dict[str, Any]) -> str:
    """The report for a terminal."""
    sizes, counts = report["sizes"], report["parameters"]
    lines = [
        ("folder", report["folder"]),
        ("model type", report["model_type"]),
        ("layers", _layer_text(report["layers"])),
        ("width", "{hidden_size:,}; {num_attention_heads} heads of {head_dim}, {num_key_value_heads} "
                  "of keys and values, the first {rotary_dim} dimensions rotate".format(**sizes)),
        ("experts", "{num_local_experts} of width {intermediate_size:,}, {num_experts_per_tok} for each token"
                    .format(**sizes) + (", and a shared one" if sizes["shared_intermediate_size"] else "")),
        ("vocabulary", "{vocab_size:,}; up to {max_position_embeddings:,} positions".format(**sizes)),
        ("parameters", f"{counts['total']:,}"),
        ("active", f"{counts['active']:,} for a token, without embedding and head; "
                   f"{counts['active_with_embedding_and_head']:,} with them"),
        *_weight_lines(report["weights"]),
    ]  # fmt: skip
    memory = table(
        ("context", "cache", "weights and cache"),
        [
            (tokens(int(n)), byte_text(needed["cache"]), byte_text(needed["total"]))
            for n, needed in report["inference_bytes"].items()
        ],
    )
    text = "\n".join(f"{name:12}{value}" for name, value in lines)
    return f"{text}\n\nmemory for one sequence in {report['inference_dtype']}:\n\n{memory}"


def _layer_text(layers: list[str]) -> str:
    kinds = Counter(layers)
    counted = ", ".join(f"{kinds[kind]} {kind}" for kind in ("lightning", "softmax") if kinds[kind])
    softmax = [str(i) for i, kind in enumerate(layers) if kind == "softmax"]
    places = f" (softmax: {', '.join(softmax)})" if 0 < len(softmax) < len(layers) else ""
    return f"{len(layers)}: {counted}{places}"


def _weight_lines(weights: dict[str, Any]) -> list[tuple[str, str]]:
    if "error" in weights:
        return [("weights", weights["error"])]
    dtypes = ", ".join(f"{name} {byte_text(n)}" for name, n in weights["bytes_by_dtype"].items())
    files = "1 file" if weights["files"] == 1 else f"{weights['files']:,} files"
    wrong = [("missing", name) for name in weights["missing"]]
    wrong += [("left over", "{name} (in {file})".format(**tensor)) for tensor in weights["unexpected"]]
    wrong += [
        ("shape", "{name} (in {file}) is {found}, the config asks for {wanted}".format(**tensor))
        for tensor in weights["mismatched"]
    ]
    shown = wrong[:20] + ([("", f"... and {len(wrong) - 20:,} more")] if len(wrong) > 20 else [])
    checked = shown or [("", "every tensor of the config is there, in its shape, and none is left over")]
    return [("weights", f"{weights['tensors']:,} tensors in {files}: {dtypes}"), *checked]
