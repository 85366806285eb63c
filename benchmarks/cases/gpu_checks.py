"""Whether the Triton kernels are right on this GPU: each shipped configuration against float64, hard cases.

About two minutes on a GPU. The case `gpu` begins with it; needs torch and triton only.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch
from torch import Tensor

from minimax_kernels import (
    BLOCK,
    BlockMemory,
    cu_seqlens_from_lengths,
    lightning_attention,
    lightning_decode,
)
from minimax_kernels.lightning.chunked import chunked
from minimax_kernels.lightning.triton_backward import backward
from minimax_kernels.lightning.triton_forward import forward
from minimax_kernels.lightning.triton_segments import SEGMENT_LENGTHS

from ..harness.measure import device

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = (16, 32, 64, 80, 96, 128, 192, 256)
ALLOWED = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 2e-5}  # see `relative`
RESULTS = ("out", "last", "dq", "dk", "dv", "dstate")
DECAYS = (0.0, 0.004, 0.917004, 5.0, 50.0)


@dataclass(frozen=True)
class Finding:
    check: str
    error: float
    allowed: float  # 0 where bits must be equal

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # False for NaN


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    rng = torch.Generator(device()).manual_seed(seed)
    return torch.randn(*shape, generator=rng, device=device()).to(dtype)


def relative(found: Tensor, expected: Tensor, *, heads: int = 2) -> float:
    """The largest error of a head relative to that head; `heads` is the dimension they lie on."""
    found, expected = (x.double().movedim(heads, 0).flatten(1) for x in (found, expected))
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)).max())


def values(dtype: torch.dtype, D: int, *, small: bool = False) -> list[Finding]:
    """Outputs and gradients, dense and packed, in one pass and in segments, against float64."""
    found = []
    decays = DECAYS[1:3] if small else DECAYS
    H, T = len(decays), 150 if small else SEGMENT_LENGTHS[-1] + 200
    log_decay = -torch.tensor(decays, device=device())
    packed = cu_seqlens_from_lengths(torch.tensor([70, 0, 1, T - 80])).to(device())
    for packing, S, cu_seqlens in (("dense", 1, None), ("packed", 4, packed)):
        q, k, v, dout = (normal(1, T, H, D, dtype=dtype, seed=seed) * D**-0.25 for seed in range(4))
        state, dlast = (normal(S, H, D, D, seed=seed) for seed in (4, 5))
        args = q, k, v, log_decay, state
        exact = exact_results(args, cu_seqlens, dout, dlast)
        for segment_length in (0, 64 if small else SEGMENT_LENGTHS[-1]):
            out, last, starts = forward(*args, cu_seqlens, segment_length=segment_length)
            gradients = backward(*args, starts, cu_seqlens, dout, dlast, segment_length=segment_length)
            way = "segments" if segment_length else "one pass"
            for name, result, wanted in zip(RESULTS, (out, last, *gradients), exact, strict=True):
                error = relative(result, wanted, heads=1 if name in ("last", "dstate") else 2)
                check = f"{name}: {_name(dtype)}, D = {D}, {packing}, {way}"
                found.append(Finding(check, error, ALLOWED[dtype]))
    return found


def exact_results(
    args: tuple[Tensor, ...], cu_seqlens: Tensor | None, dout: Tensor, dlast: Tensor
) -> tuple[Tensor, ...]:
    """RESULTS in float64 by blocks, which the tests hold to the token by token recurrence."""
    q, k, v, log_decay, state = (x.double() for x in args)
    leaves = [x.requires_grad_() for x in (q, k, v, state)]
    out, last = chunked(q, k, v, log_decay, state, cu_seqlens)
    gradients = torch.autograd.grad([out, last], leaves, [dout.double(), dlast.double()])
    return out.detach(), last.detach(), *gradients


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def replay(dtype: torch.dtype, D: int, *, small: bool = False) -> list[Finding]:
    """Decoded outputs are the forward's, bit for bit, across a block boundary."""
    B, H, T = (1, 1, 66) if small else (3, 4, 2 * BLOCK + 2)
    q, k, v = (normal(B, T, H, D, dtype=dtype, seed=seed) for seed in range(3))
    log_decay = -torch.rand(H, device=device())
    out, _ = lightning_attention(q, k, v, log_decay, backend="triton")
    cache = empty_memory(B, H, D, dtype)
    wrong = 0
    for t in range(T):
        row = lightning_decode(*(x[:, t : t + 1] for x in (q, k, v)), log_decay, cache, backend="triton")
        wrong += int((row != out[:, t : t + 1]).sum())
    return [Finding(f"decoded elements with other bits: {_name(dtype)}, D = {D}", wrong, 0)]


def empty_memory(B: int, H: int, D: int, dtype: torch.dtype) -> BlockMemory:
    """Nothing seen, and NaN where keys and values will be."""
    k = torch.empty(B, 1, H, D, dtype=dtype, device=device())
    memory = BlockMemory.empty(k, k)
    memory.k_cache.fill_(float("nan"))
    memory.v_cache.fill_(float("nan"))
    return memory


def fused_views(T: int = 88_000, H: int = 64, D: int = 128, tail: int = 4096) -> list[Finding]:
    """q, k, v as views of one buffer whose offsets pass 2^31 elements, against a copy of its tail."""
    tail, compared = min(tail, T // 2 // BLOCK * BLOCK), min(512, T // 4)
    fused = normal(1, T, H, 3 * D, dtype=torch.bfloat16).mul_(D**-0.25)
    q, k, v = (x.detach() for x in fused.split(D, dim=-1))
    log_decay = -torch.linspace(0.9, 0.004, H, device=device())
    dout = normal(1, T, H, D, dtype=torch.bfloat16, seed=1)

    def run(state: Tensor | None, *xs: Tensor) -> tuple[Tensor, ...]:
        q, k, v, dout = xs
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, _ = lightning_attention(*leaves, log_decay, initial_state=state, backend="triton")
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    cut = T - tail
    _, carried = lightning_attention(*(x[:, :cut] for x in (q, k, v)), log_decay, backend="triton")
    whole = run(None, q, k, v, dout)
    alone = run(carried, *(x[:, cut:].contiguous() for x in (q, k, v, dout)))
    names = ("out", "dq", "dk", "dv")
    return [
        Finding(f"{name}: fused buffer of {fused.numel():,} elements", relative(a[:, -compared:], b), 2e-2)
        for name, a, b in zip(names, whole, (x[:, -compared:] for x in alone), strict=True)
    ]


def many_programs(S: int = 1100, H: int = 64, D: int = 16) -> list[Finding]:
    """Sequences times heads beyond 65,535, the limit of the grid's other axes."""
    q, k, v = (normal(1, 3 * S, H, D, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    cu_seqlens = torch.arange(0, 3 * S + 1, 3, dtype=torch.int32, device=device())
    log_decay = -torch.linspace(0.9, 0.004, H, device=device())
    found = lightning_attention(q, k, v, log_decay, cu_seqlens=cu_seqlens, backend="triton")
    state = torch.zeros(S, H, D, D, device=device())
    expected = chunked(q.float(), k.float(), v.float(), log_decay, state, cu_seqlens)
    return [
        Finding(f"{name}: {S} sequences of {H} heads", relative(a, b, heads=heads), 2e-2)
        for name, heads, a, b in zip(("out", "last"), (2, 1), found, expected, strict=True)
    ]


def graph_and_compiler(B: int = 2, H: int = 4, D: int = 64) -> list[Finding]:
    """Decode captured in a CUDA graph, and the operator under torch.compile, give the eager bits."""
    found = []
    q, k, v = (normal(B, 8, H, D, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    log_decay = -torch.rand(H, device=device())
    if torch.cuda.is_available():
        eager, captured = empty_memory(B, H, D, q.dtype), empty_memory(B, H, D, q.dtype)
        static = [x[:, :1].clone() for x in (q, k, v)]
        lightning_decode(*static, log_decay, empty_memory(B, H, D, q.dtype), backend="triton")  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            row = lightning_decode(*static, log_decay, captured, backend="triton")
        wrong = 0
        for t in range(8):
            for buffer, x in zip(static, (q, k, v), strict=True):
                buffer.copy_(x[:, t : t + 1])
            graph.replay()
            expected = lightning_decode(*static, log_decay, eager, backend="triton")
            wrong += int((row != expected).sum())
        found.append(Finding("elements of a captured decode with other bits", wrong, 0))
    run = torch.compile(
        lambda q, k, v: lightning_attention(q, k, v, log_decay, backend="triton")[0],
        fullgraph=True,
        backend="inductor" if torch.cuda.is_available() else "aot_eager",
    )
    expected, _ = lightning_attention(q, k, v, log_decay, backend="triton")
    found.append(Finding("compiled elements with other bits", int((run(q, k, v) != expected).sum()), 0))
    return found


def _both(dtype: torch.dtype, D: int) -> list[Finding]:
    return values(dtype, D) + replay(dtype, D)


def findings(*, small: bool) -> Iterator[Finding]:
    if small:
        yield from values(torch.bfloat16, 16, small=True)
        yield from replay(torch.bfloat16, 16, small=True)
        yield from fused_views(T=300, H=2, D=16, tail=128)
        yield from many_programs(S=5, H=2)
        yield from graph_and_compiler(B=1, H=1, D=16)
        return
    jobs = [(dtype, D) for dtype in DTYPES for D in WIDTHS]
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:  # compiling is the slow part
        for group in pool.map(_both, *zip(*jobs, strict=True)):
            yield from group
    yield from fused_views()
    yield from many_programs()
    yield from graph_and_compiler()


def failures(*, small: bool) -> tuple[int, int]:
    """How many checks failed, of how many; each failure is printed."""
    count = wrong = 0
    for finding in findings(small=small):
        count += 1
        if not finding.passed:
            wrong += 1
            print(f"WRONG {finding.check}: {finding.error:.3g}, allowed {finding.allowed:.3g}", flush=True)
    print(f"{count - wrong} of {count} checks passed", flush=True)
    return wrong, count
