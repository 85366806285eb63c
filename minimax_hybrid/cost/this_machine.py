"""What this machine is and how fast its CPU is: measured, not read from a data sheet."""

import os
import platform
import time
from collections.abc import Callable

import torch


def matmul_rate(dtype: str, *, size: int, repeats: int) -> float:
    """FLOP/s of square matrix products."""
    a, b = (torch.randn(size, size).to(getattr(torch, dtype)) for _ in range(2))
    return 2 * size**3 / _least_seconds(lambda: a @ b, repeats)


def copy_rate(*, repeats: int) -> float:
    """Bytes/s read and written by a copy larger than the caches."""
    source = torch.ones(2**26, dtype=torch.float32)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _least_seconds(lambda: target.copy_(source), repeats)


def cpu_name() -> str:
    """The processor's name and how many cores the machine has."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {os.cpu_count()} cores"


def _least_seconds(work: Callable[[], object], repeats: int) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def total_memory() -> float:
    """Bytes of memory; infinity where the system does not tell."""
    try:
        with open("/proc/meminfo") as lines:
            return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal"))
    except (OSError, StopIteration):
        return float("inf")
