"""Cost tables of a configuration against its softmax twin, DeepSeek-R1 or Qwen3-235B: data, text, picture.

report = cost_report(config, against="softmax")      plain numbers, ready for json.dumps
print(cost_text(report))
cost_plot(report, "cost.svg")
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ..config import MiniMaxM1Config
from .counts import break_even, cache_bytes, flops, inference_bytes, parameters, softmax_twin, weight_bytes
from .plotting import COLORS, picture, token_axis, tokens
from .published import QWEN3, R1, R1_ABSORBED, figure_curves, generation_flops
from .roofline import DEVICES, Device, decode_bound, prefill_bound, this_cpu

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
    rows = [row for row in report["lengths"] if row["length"] in TABLE_LENGTHS] or report["lengths"]
    parts = [_parameter_text(report), _length_text(report, rows)]
    even = report["break_even_tokens"]
    parts.append(
        "a lightning layer is cheaper than a softmax layer of the same widths "
        f"from {even['memory']:,.0f} tokens (memory), {even['decode_flops']:,.0f} (FLOPs of a decode step)"
    )
    if report["bounds"]:
        parts.append(_bound_text(report, {row["length"] for row in rows}))
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


def _length_text(report: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    if report["against"] == "softmax":
        head = (
            "length", "prefill FLOPs/token", "of twin", "decode FLOPs/token", "of twin",
            f"cache ({report['dtype']})", "of twin", "inference memory",
        )  # fmt: skip
        lines = []
        for row in rows:
            twin, cells = row["against"], [tokens(row["length"])]
            for mode in ("prefill", "decode"):
                ours, theirs = (r["flops_per_token"][mode]["total"] for r in (row, twin))
                cells += [f"{ours:.4g}", f"{ours / theirs:.1%}"]
            ours, theirs = (r["cache_bytes"]["total"] for r in (row, twin))
            lines.append([*cells, byte_text(ours), f"{ours / theirs:.1%}", byte_text(row["inference_bytes"])])
        return table(head, lines)
    names = list(rows[0]["against"]["generation_flops"])
    figure = "figure1" in rows[0]["against"]
    head = ["generated", "FLOPs", *(f"of {name}" for name in names)]
    head += ["as Figure 1 draws it"] if figure else []
    lines = []
    for row in rows:
        ours, theirs = row["generation_flops"], row["against"]["generation_flops"]
        cells = [tokens(row["length"]), f"{ours:.4g}", *(f"{ours / theirs[name]:.1%}" for name in names)]
        if figure:
            drawn = row["against"]["figure1"]
            cells.append(f"{drawn['ours'] / drawn['theirs']:.1%}")
        lines.append(cells)
    return table(head, lines)


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


def cost_plot(report: dict[str, Any], path: Path | str) -> None:
    """Draw the report: per token and cache against the twin, or generation against a peer."""
    lengths = [row["length"] for row in report["lengths"]]
    if report["against"] == "softmax":
        with picture(path, panels=2) as (left, right):
            for name, rows in (
                ("hybrid", report["lengths"]),
                ("softmax", [row["against"] for row in report["lengths"]]),
            ):
                label = name if name == "hybrid" else "softmax twin"
                decode = [row["flops_per_token"]["decode"]["total"] for row in rows]
                cache = [row["cache_bytes"]["total"] / 1e9 for row in rows]
                left.plot(lengths, decode, color=COLORS[name], label=label)
                right.plot(lengths, cache, color=COLORS[name], label=label)
            left.set_title("FLOPs of one decoded token")
            right.set_title(f"cache of one sequence, GB ({report['dtype']})")
            for axis in (left, right):
                token_axis(axis, lengths, every=2)
                axis.set_yscale("log")
                axis.set_xlabel("context, tokens")
                axis.legend()
        return
    with picture(path) as (axis,):
        axis.plot(lengths, [row["generation_flops"] for row in report["lengths"]], color=COLORS["hybrid"],
                  label="this model")  # fmt: skip
        shades = (COLORS["softmax"], COLORS["other"])
        for name, color in zip(report["lengths"][0]["against"]["generation_flops"], shades, strict=False):
            values = [row["against"]["generation_flops"][name] for row in report["lengths"]]
            axis.plot(lengths, values, color=color, label=name)
        token_axis(axis, lengths, every=2)
        axis.set_yscale("log")
        axis.set_title("FLOPs of a generation, exact counts")
        axis.set_xlabel("generated tokens")
        axis.legend()


def named_devices(names: Sequence[str]) -> list[Device]:
    """Devices by name: those of `DEVICES`, and "cpu" for this machine, measured now."""
    found = []
    for name in names:
        if name.lower() == "cpu":
            found.append(this_cpu())
        elif name.upper() in DEVICES:
            found.append(DEVICES[name.upper()])
        else:
            raise ValueError(f"device {name!r} is unknown; use {sorted(DEVICES)} or 'cpu'")
    return found


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns under their heads, the first to the left and the others to the right."""
    widths = [max(len(row[i]) for row in (head, *lines)) for i in range(len(head))]
    rows = [head, ["-" * width for width in widths], *lines]
    first, *others = widths
    return "\n".join(
        "  ".join([row[0].ljust(first), *(cell.rjust(w) for cell, w in zip(row[1:], others, strict=True))])
        for row in rows
    )


def byte_text(count: float) -> str:
    """Bytes as people say them: 293.6 MB (decimal units)."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
