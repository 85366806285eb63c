"""Lightning attention on this GPU: first whether it is right, then its speed beside its peers.

    python -m benchmarks.run --case gpu --seconds 300    rows go to results/<device>.csv
    python -m benchmarks.run --case gpu --check-only     two minutes; fails if any check does
    python -m benchmarks.run --case gpu --quick          small, also in Triton's interpreter

Sides: this project's `triton` and `chunked`; `fla`, flash-linear-attention's simple_gla with our decay, if it
is installed; `softmax`, causal attention through SDPA. Times are medians of triton.testing.do_bench, which
clears the L2 cache between runs; decode runs in a CUDA graph over enough caches to outgrow L2. The share is
the least bytes that the task must move, over time and bandwidth, the same for every side.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch import Tensor

from minimax_hybrid.cost.roofline import DEVICES
from minimax_hybrid.lightning_attention import layer_log_decay
from minimax_kernels import BLOCK, BlockMemory, cu_seqlens_from_lengths, lightning_decode
from minimax_kernels.backends import available

from ..harness.measure import Stopped, Work, device
from ..harness.rows import Row, measured
from .gpu_checks import failures
from .operators import attention_work, operator

ABOUT = (
    "lightning attention on a GPU by backend and its peers, heads of 128, bfloat16, each number next to its "
    "share of the memory roofline; nothing is timed unless all checks of the Triton kernels pass"
)
TESTS = ()  # its own checks, which need no pytest
L2 = 256 * 2**20  # bytes; more than any Hopper GPU caches
TOO_LONG = 2e15  # FLOPs of softmax attention, a few seconds; longer tasks leave it out


@dataclass(frozen=True)
class Shape:
    kind: str  # "forward", "forward+backward", "packed forward", "packed forward+backward" or "decode"
    H: int
    T: int  # positions in all for packed tasks, 1 for decode
    B: int = 1  # sequences, also the packed ones
    D: int = 128

    @property
    def least_bytes(self) -> float:
        """What must move once: bfloat16 inputs and outputs, float32 states."""
        tensor = 2 * self.T * self.H * self.D * (1 if "packed" in self.kind else self.B)
        if self.kind == "decode":
            state = 4 * self.B * self.H * self.D**2
            # half a block of k and of v, and q, k, v, out
            return state * (1 + 1 / BLOCK) + tensor * (4 + BLOCK)
        return tensor * (11 if "backward" in self.kind else 4)

    @property
    def softmax_flops(self) -> float:
        return 2 * self.B * self.H * self.D * self.T**2 * (3.5 if "backward" in self.kind else 1)


def tasks(*, small: bool) -> Iterator[Shape]:
    if small:
        for kind in ("forward", "forward+backward", "packed forward+backward"):
            yield Shape(kind, 2, 130, 2 if "packed" in kind else 1, 16)
        yield Shape("decode", 2, 1, 2, 16)
        return
    for B in (1, 16, 64, 256):
        yield Shape("decode", 64, 1, B)
    for H in (64, 8):
        for kind in ("forward", "forward+backward"):
            yield from (Shape(kind, H, 1024 * 2**n) for n in range(11))
            yield from (Shape(kind, H, 1024 * 2**n, 8) for n in range(6))
    for S in (8, 32):
        yield from (Shape(kind, 64, 65536, S) for kind in ("packed forward", "packed forward+backward"))


def sides(task: Shape) -> list[str]:
    """Who can take part: peers that are installed, and tasks that fit into time and memory."""
    found = ["triton"] if "triton" in available() else []
    if find_spec("fla"):
        found.append("fla")
    if task.kind == "decode":
        return found
    if task.least_bytes < 2e9:
        found.append("chunked")
    if "packed" not in task.kind and task.softmax_flops < TOO_LONG:
        found.append("softmax")
    return found


def prepare(side: str, task: Shape) -> tuple[Work, int]:
    """The work, and how many times it does the task."""
    if task.kind == "decode":
        return decode(side, task)
    packed = "packed" in task.kind
    inputs = normal(4, 1 if packed else task.B, task.T, task.H, task.D)
    cu_seqlens = uneven(task) if packed else None
    return attention_work(side, inputs, cu_seqlens=cu_seqlens, backward="backward" in task.kind), 1


def normal(count: int, *shape: int) -> list[Tensor]:
    return [torch.randn(*shape, device=device(), dtype=torch.bfloat16) for _ in range(count)]


def uneven(task: Shape) -> Tensor:
    """Bounds of sequences whose lengths grow in equal steps from near nothing to twice the mean."""
    share = torch.arange(1, task.B + 1, dtype=torch.float64)
    lengths = (share / share.sum() * task.T).long()
    lengths[-1] += task.T - lengths.sum()
    return cu_seqlens_from_lengths(lengths).to(device())


def distance_to_peer() -> float:
    """By how much of the largest output fla's differs from the definition, or 0.0 where that is rounding."""
    q, k, v = normal(3, 1, 300, 4, 64)
    log_decay = layer_log_decay(4, 3, 8, device=q.device)
    ours, peer = (operator(side, log_decay)(q, k, v).float() for side in ("reference", "fla"))
    error = float((ours - peer).abs().max() / ours.abs().max())
    return error if not error < 0.02 else 0.0


def decode(side: str, task: Shape) -> tuple[Work, int]:
    """One token for every sequence, on so many caches in turn that none is in L2 when it is next read."""
    B, H, D = task.B, task.H, task.D
    log_decay = layer_log_decay(H, 3, 8, device=torch.device(device()))
    q, k, v = normal(3, B, 1, H, D)
    times = max(1, min(64, int(L2 / task.least_bytes))) if torch.cuda.is_available() else 1
    if side == "fla":
        from fla.ops.simple_gla import fused_recurrent_simple_gla

        options = {"g_gamma": log_decay, "scale": 1.0, "output_final_state": True}
        memories = [torch.zeros(B, H, D, D, device=device()) for _ in range(times)]

        def step(state: Tensor) -> object:
            return fused_recurrent_simple_gla(q, k, v, initial_state=state, **options)
    else:
        memories = [BlockMemory.empty(k, v) for _ in range(times)]
        for memory in memories:
            memory.cache_seqlens.fill_(BLOCK // 2)

        def step(memory: BlockMemory) -> object:
            return lightning_decode(q, k, v, log_decay, memory, backend=side)

    return torch.inference_mode()(lambda: [step(memory) for memory in memories]), times


def seconds(work: Work, *, graph: bool) -> tuple[float, float, float]:
    """20th, 50th and 80th percentile."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start,) * 3
    from triton.testing import do_bench, do_bench_cudagraph

    quantiles = [0.2, 0.5, 0.8]
    if graph:
        found = do_bench_cudagraph(work, rep=20, quantiles=quantiles)
    else:
        found = do_bench(work, warmup=10, rep=60, quantiles=quantiles)
    return tuple(ms / 1000 for ms in found)


def bandwidth() -> float | None:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((card.bytes_per_second for card in DEVICES.values() if card.name in name), None)


def measure(task: Shape, side: str) -> list[Row]:
    """The time of one side of one task, and its share of the roofline where the bandwidth is known."""
    work, times = prepare(side, task)
    work()  # compiles
    took = [x / times for x in seconds(work, graph=task.kind == "decode")]
    name = f"{task.kind}, {task.H} heads of {task.D}"
    what = dict(case="gpu", side=side, task=name, length=task.T, batch=task.B, dtype="bfloat16")
    numbers = {("time", "s"): took}
    if bytes_per_second := bandwidth():
        numbers["roofline", "1"] = [task.least_bytes / x / bytes_per_second for x in reversed(took)]
    return [  # do_bench chooses how many rounds
        replace(measured([p50], **what, metric=metric, unit=unit), p20=p20, p80=p80, rounds=0)
        for (metric, unit), (p20, p50, p80) in numbers.items()
    ]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check-only", action="store_true", help="time nothing")
    parser.add_argument("--seconds", type=float, default=240, help="start no timing after this long")


def run(options: argparse.Namespace) -> Iterator[Row]:
    if "triton" not in available() or not (torch.cuda.is_available() or options.quick):
        raise Stopped("no GPU that Triton can use: nothing was checked or timed", status=2)
    wrong, _ = failures(small=options.quick)
    if wrong:
        raise Stopped(f"{wrong} checks of the Triton kernels failed: nothing is timed", status=1)
    if options.check_only:
        raise Stopped("checked only: nothing was timed")
    peers = True
    if not find_spec("fla"):
        print("flash-linear-attention is not installed; its side is left out")
    elif error := distance_to_peer():
        peers = False
        print(f"fla differs from the definition by {error:.3f} of the largest output; its side is left out")
    start, left_out = time.perf_counter(), 0
    for task in tasks(small=options.quick):
        if time.perf_counter() - start > options.seconds:
            left_out += 1
            continue
        for side in sides(task):
            if side != "fla" or peers:
                yield from measured_or_reported(task, side)
    if left_out:
        print(f"{left_out} tasks were left out after {options.seconds:.0f} s")


def measured_or_reported(task: Shape, side: str) -> list[Row]:
    """The rows, printed; or none and the reason, so that one that fails does not stop the others."""
    label = f"{side:8} {task.kind:24} H={task.H} B={task.B} T={task.T}"
    try:
        rows = measure(task, side)
    except Exception as error:
        print(f"{label}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return []
    print(f"{label}: " + "  ".join(f"{row.metric} {row.p50:.4g} {row.unit}" for row in rows), flush=True)
    return rows
