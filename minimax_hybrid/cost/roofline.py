"""The least time a decode step or a prefill can take on a device.

    seconds = max(FLOPs / peak FLOP/s, bytes moved / bandwidth)

A bound, not a forecast: several devices divide both terms and their communication is free. Data-sheet
figures for the GPUs (dense, SXM); `this_cpu()` measures the machine it runs on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from minimax_kernels import BLOCK

from ..config import MiniMaxM1Config
from .counts import cache_bytes, flops, itemsize, parameters
from .this_machine import copy_rate, cpu_name, matmul_rate, total_memory


@dataclass(frozen=True)
class Device:
    """A machine as the roofline sees it."""

    name: str
    flops_per_second: dict[str, float]  # by type
    bytes_per_second: float
    memory: float  # bytes

    def peak(self, dtype: str) -> float:
        if dtype not in self.flops_per_second:
            known = sorted(self.flops_per_second)
            raise ValueError(f"no peak is known for {dtype} on {self.name}; use one of {known}")
        return self.flops_per_second[dtype]


_HOPPER = {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 66.9e12}
DEVICES = {
    "H100": Device("H100", _HOPPER, 3.35e12, 80e9),
    "H800": Device("H800", _HOPPER, 3.35e12, 80e9),  # an H100 with slower links between devices
    "H200": Device("H200", _HOPPER, 4.8e12, 141e9),
}


@dataclass(frozen=True)
class Bound:
    """Least seconds of arithmetic and of memory traffic; the longer one is the roofline's time."""

    compute: float
    memory: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory)

    @property
    def limit(self) -> str:
        return "compute" if self.compute >= self.memory else "memory"


def decode_bound(
    config: MiniMaxM1Config,
    length: int,
    device: Device,
    *,
    batch: int = 1,
    devices: int = 1,
    dtype: str = "bfloat16",
) -> Bound:
    """One token for each of `batch` sequences that hold `length` tokens.

    Read once: every weight but the embedding table, and of the experts those that `batch` tokens reach in
    the mean under even routing, E (1 - (1 - A/E)^batch). Per sequence: keys and values, states, half an open
    block (its mean filling), and the states written back once in a block.
    """
    weights = _weights_read(config, batch, dtype)
    cache = cache_bytes(config, length, dtype=dtype)
    sequence = cache.total + cache.open_block / 2 + cache.state / BLOCK
    work = batch * flops(config, length, "decode").total
    return _bound(work, weights + batch * sequence, device, devices, dtype)


def prefill_bound(
    config: MiniMaxM1Config,
    length: int,
    device: Device,
    *,
    batch: int = 1,
    devices: int = 1,
    dtype: str = "bfloat16",
) -> Bound:
    """`length` tokens of each of `batch` prompts, and the logits of the last of them.

    Weights are read once, as in `decode_bound`; caches are written once. Lightning layers work in blocks of
    `minimax_kernels.BLOCK` positions, as the kernels do.
    """
    moved = _weights_read(config, batch * length, dtype)
    moved += batch * cache_bytes(config, length, dtype=dtype).total
    per_token = flops(config, length, "prefill", block=BLOCK)
    head = per_token.components["lm_head"]
    work = batch * (length * (per_token.total - head) + head)
    return _bound(work, moved, device, devices, dtype)


def _bound(work: float, moved: float, device: Device, devices: int, dtype: str) -> Bound:
    """FLOPs and bytes, spread evenly over the devices."""
    return Bound(work / device.peak(dtype) / devices, moved / device.bytes_per_second / devices)


def _weights_read(config: MiniMaxM1Config, count: int, dtype: str) -> float:
    """Bytes of the weights that `count` tokens together use: no embedding table, and E (1 - (1 - A/E)^count)
    experts in the mean, as under even routing."""
    counts, E, A = parameters(config), config.num_local_experts, config.num_experts_per_tok
    experts = counts.components["moe_experts"]
    fixed = counts.active_with_head - counts.active_components["moe_experts"]
    return (fixed + experts * (1 - (1 - A / E) ** count)) * itemsize(dtype)


def this_cpu(*, size: int = 1536, repeats: int = 5) -> Device:
    """This machine, measured in about two seconds."""
    rates = {dtype: matmul_rate(dtype, size=size, repeats=repeats) for dtype in ("float32", "bfloat16")}
    return Device(cpu_name(), rates, copy_rate(repeats=repeats), total_memory())


def named_devices(names: Sequence[str]) -> list[Device]:
    """The devices of these names: those of `DEVICES`, and "cpu" for this machine, measured now."""
    found = []
    for name in names:
        if name.lower() == "cpu":
            found.append(this_cpu())
        elif name.upper() in DEVICES:
            found.append(DEVICES[name.upper()])
        else:
            raise ValueError(f"device {name!r} is unknown; use {sorted(DEVICES)} or 'cpu'")
    return found
