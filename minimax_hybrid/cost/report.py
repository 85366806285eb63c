"""Cost tables of a configuration against its softmax twin, DeepSeek-R1 or Qwen3-235B: data and text.

report = cost_report(config, against="softmax")      plain numbers, ready for json.dumps
print(cost_text(report))
plotting.cost_plot(report, "cost.svg")
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

from ..config import MiniMaxM1Config
from ..formatting import byte_text, table, tokens
from .counts import (
    break_even,
    cache_bytes,
    flops,
    generation_flops,
    inference_bytes,
    parameters,
    softmax_twin,
    weight_bytes,
)
from .published import QWEN3, R1, R1_ABSORBED, figure_curves
from .roofline import Device, decode_bound, prefill_bound

Against = Literal["softmax", "r1", "qwen3"]
LENGTHS = tuple(2**n for n in range(10, 21))
TABLE_LENGTHS = (1024, 8192, 32768, 131072, 1048576)
_PEERS = {"r1": (R1, R1_ABSORBED), "qwen3": (QWEN3,)}
_FIGURE_NAMES = {"r1": "DeepSeek R1", "qwen3": "Qwen3-235B-A22B"}


def cost_report(
    config: MiniMaxM1Config,
    *,
    lengths: Sequence[int] = LENGTHS,
    against: Against = "softmax",
    devices: Sequence[Device] = (),
    dtype: str = "bfloat16",
) -> dict[str, Any]:
    """Everything the cost model says about a configuration, as plain numbers.

    `devices` adds roofline times, each on the fewest devices whose memory holds weights and one cache.
    """
    if against != "softmax" and against not in _PEERS:
        raise ValueError(f"against is {against!r}; choose 'softmax', 'r1' or 'qwen3'")
    counts, even = parameters(config), break_even(config)
    return {
        "parameters": {
            "total": counts.total,
            "active": counts.active,
            "active_with_head": counts.active_with_head,
            "components": counts.components,
            "active_components": counts.active_components,
        },
        "weight_bytes": {name: weight_bytes(config, name) for name in ("float32", "bfloat16")},
        "dtype": dtype,
        "break_even_tokens": {"memory": even.memory, "decode_flops": even.decode_flops},
        "against": against,
        "lengths": [
            _at_length(config, n, dtype) | {"against": _compared(config, n, against, dtype)} for n in lengths
        ],
        "bounds": [_bounds(config, device, n, dtype) for device in devices for n in lengths],
    }


def _at_length(config: MiniMaxM1Config, length: int, dtype: str) -> dict[str, Any]:
    cache = cache_bytes(config, length, dtype=dtype)
    modes = {mode: flops(config, length, mode) for mode in ("prefill", "decode", "training")}
    return {
        "length": length,
        "flops_per_token": {
            mode: {"total": counted.total, **counted.components} for mode, counted in modes.items()
        },
        "generation_flops": generation_flops(config, length),
        "cache_bytes": {
            "keys_values": cache.keys_values,
            "state": cache.state,
            "open_block": cache.open_block,
            "total": cache.total,
        },
        "inference_bytes": inference_bytes(config, length, dtype=dtype),
    }


def _compared(config: MiniMaxM1Config, length: int, against: Against, dtype: str) -> dict[str, Any]:
    if against == "softmax":
        return _at_length(softmax_twin(config), length, dtype)
    compared: dict[str, Any] = {"generation_flops": {peer.name: peer(length) for peer in _PEERS[against]}}
    if parameters(config).components == parameters(MiniMaxM1Config.m1()).components:
        curves = figure_curves()
        ours, theirs = (curves[name](length) for name in ("MiniMax-M1", _FIGURE_NAMES[against]))
        compared["figure1"] = {"ours": ours, "theirs": theirs}
    return compared


def _bounds(config: MiniMaxM1Config, device: Device, length: int, dtype: str) -> dict[str, Any]:
    needed = inference_bytes(config, length, dtype=dtype)
    count = max(1, math.ceil(needed / device.memory))
    decode = decode_bound(config, length, device, devices=count, dtype=dtype)
    prefill = prefill_bound(config, length, device, devices=count, dtype=dtype)
    return {
        "device": device.name,
        "devices": count,
        "length": length,
        "decode_seconds": decode.seconds,
        "decode_limit": decode.limit,
        "prefill_seconds": prefill.seconds,
        "prefill_limit": prefill.limit,
    }


def cost_text(report: dict[str, Any]) -> str:
    """The report as tables for a terminal; of the lengths, those of `TABLE_LENGTHS` if they are there."""
    shown = [at for at in report["lengths"] if at["length"] in TABLE_LENGTHS] or report["lengths"]
    parts = [_parameter_text(report), _length_text(report, shown)]
    even = report["break_even_tokens"]
    parts.append(
        "a lightning layer is cheaper than a softmax layer of the same widths "
        f"from {even['memory']:,.0f} tokens (memory), {even['decode_flops']:,.0f} (FLOPs of a decode step)"
    )
    if report["bounds"]:
        parts.append(_bound_text(report, {at["length"] for at in shown}))
    return "\n\n".join(parts)


def _parameter_text(report: dict[str, Any]) -> str:
    counts = report["parameters"]
    lines = [
        (name, f"{total:,}", f"{counts['active_components'][name]:,}")
        for name, total in counts["components"].items()
        if total
    ]
    active = sum(counts["active_components"].values())
    lines += [
        ("total; with embedding and head", f"{counts['total']:,}", f"{active:,}"),
        ("without embedding and head", "", f"{counts['active']:,}"),
    ]
    weights = ", ".join(f"{byte_text(n)} in {dtype}" for dtype, n in report["weight_bytes"].items())
    return table(("parameters", "total", "active"), lines) + f"\nweights: {weights}"


def _length_text(report: dict[str, Any], entries: list[dict[str, Any]]) -> str:
    if report["against"] == "softmax":
        head = (
            "length", "prefill FLOPs/token", "of twin", "decode FLOPs/token", "of twin",
            f"cache ({report['dtype']})", "of twin", "inference memory",
        )  # fmt: skip
        lines = []
        for at in entries:
            twin, cells = at["against"], [tokens(at["length"])]
            for mode in ("prefill", "decode"):
                ours, theirs = (r["flops_per_token"][mode]["total"] for r in (at, twin))
                cells += [f"{ours:.4g}", f"{ours / theirs:.1%}"]
            ours, theirs = (r["cache_bytes"]["total"] for r in (at, twin))
            lines.append([*cells, byte_text(ours), f"{ours / theirs:.1%}", byte_text(at["inference_bytes"])])
        return table(head, lines)
    names = list(entries[0]["against"]["generation_flops"])
    figure = "figure1" in entries[0]["against"]
    drawn_too = ("as Figure 1 draws it",) if figure else ()
    columns = ("generated", "FLOPs", *(f"of {name}" for name in names), *drawn_too)
    lines = []
    for at in entries:
        ours, theirs = at["generation_flops"], at["against"]["generation_flops"]
        cells = [tokens(at["length"]), f"{ours:.4g}", *(f"{ours / theirs[name]:.1%}" for name in names)]
        if figure:
            drawn = at["against"]["figure1"]
            cells.append(f"{drawn['ours'] / drawn['theirs']:.1%}")
        lines.append(cells)
    return table(columns, lines)


def _bound_text(report: dict[str, Any], lengths: set[int]) -> str:
    lines = [
        (
            f"{bound['devices']} x {bound['device']}", tokens(bound["length"]),
            f"{bound['decode_seconds'] * 1e3:.3f} ms", bound["decode_limit"],
            f"{bound['prefill_seconds']:.3f} s", bound["prefill_limit"],
        )
        for bound in report["bounds"] if bound["length"] in lengths
    ]  # fmt: skip
    head = ("at least, on", "length", "decode step", "limit", "prefill", "limit")
    return table(head, lines)
