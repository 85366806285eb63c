"""Lightning attention (MiniMax-01 report, section 2.2): `lightning_attention` for many positions,
`lightning_decode` for one; their checks and the choice of backend."""

import torch
from torch import Tensor

from ..backends import Backend, accumulation_dtype, can_check_values, choose, without_autocast
from ..packing import check_cu_seqlens
from .chunked import chunked
from .chunked import decode as chunked_decode
from .memory import BLOCK, BlockMemory
from .reference import decode as reference_decode
from .reference import recurrence


def lightning_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Causal linear attention whose memory fades a little at every step.

        state[t] = exp(log_decay) * state[t-1] + outer(k[t], v[t])
        out[t]   = q[t] @ state[t]

    Differentiable in q, k, v and initial_state, through both results. Sums are in float32 (float64 for
    float64 inputs), under autocast too.

    Args:
        q, k: (B, T, H, Dk), already activated.
        v: (B, T, H, Dv), of the same type.
        log_decay: (H,) float, at most 0; a constant.
        initial_state: (S, H, Dk, Dv), float32 (float64 for float64 inputs); zeros if None.
        cu_seqlens: (S + 1,) int32 or int64 bounds of packed sequences, B = 1; without it S = B.
        backend: "auto", "reference", "chunked" or "triton".

    Returns:
        out (B, T, H, Dv) in v's type, zero past the last bound, and final_state (S, H, Dk, Dv).

    Raises:
        ValueError: shapes, types or devices that do not fit, a log_decay above 0 or one that requires grad.
    """
    S = _check(q, k, v, log_decay, cu_seqlens)
    _, _, H, Dk = q.shape
    Dv = v.shape[-1]
    dtype = accumulation_dtype(q)
    if initial_state is not None:
        _check_state("initial_state", initial_state, (S, H, Dk, Dv), dtype, q.device)
    name = choose(backend, q)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(q.device)  # its values are checked where it lies, on the CPU at best
    with without_autocast(q):
        if name == "triton":
            from .triton_operator import lightning_triton

            return lightning_triton(q, k, v, log_decay, initial_state, cu_seqlens)
        if initial_state is None:
            initial_state = torch.zeros(S, H, Dk, Dv, dtype=dtype, device=q.device)
        run = {"reference": recurrence, "chunked": chunked}[name]
        return run(q, k, v, log_decay, initial_state, cu_seqlens)


@torch.no_grad()
def lightning_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    memory: BlockMemory,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """The next token of every sequence, by replaying its open block: bit for bit the forward's output.

    The new key and value are appended and the output computed with the forward's own tile. A block that is
    full when the call begins is folded into the state first, so the positions of the last call can still be
    taken back by lowering `cache_seqlens`.

    Writes into all four tensors of `memory`: the one operator that changes what it is given.

    Args:
        q, k: (B, 1, H, Dk), already activated.
        v: (B, 1, H, Dv).
        log_decay: (H,) float, at most 0.
        memory: of B sequences; the caches in the type of q, with 0 to 64 positions filled.
        backend: "auto", "chunked" or "triton" ("reference" steps the recurrence over the open block).

    Returns:
        out (B, 1, H, Dv) in v's type.
    """
    _check(q, k, v, log_decay, None)
    _check_memory(memory, q, v)
    decode = {"reference": reference_decode, "chunked": chunked_decode}
    chosen = choose(backend, q)
    if chosen == "triton":
        from .triton_decode import decode_triton

        decode["triton"] = decode_triton
    with without_autocast(q):
        return decode[chosen](q, k, v, log_decay, memory)


def _check_memory(memory: BlockMemory, q: Tensor, v: Tensor) -> None:
    B, T, H, Dk = q.shape
    Dv = v.shape[-1]
    if T != 1:
        raise ValueError(f"lightning_decode takes one position, got {T}; use lightning_attention for more")
    _check_state("state", memory.state, (B, H, Dk, Dv), accumulation_dtype(q), q.device)
    for name, cache, D in (("k_cache", memory.k_cache, Dk), ("v_cache", memory.v_cache, Dv)):
        if cache.ndim != 4 or cache.shape[0] != B or cache.shape[1] < BLOCK or cache.shape[2:] != (H, D):
            raise ValueError(
                f"{name} must be ({B}, R, {H}, {D}) with R of at least {BLOCK}, got {tuple(cache.shape)}"
            )
        if cache.dtype != q.dtype:
            raise ValueError(f"{name} must have the type of q, {q.dtype}, got {cache.dtype}")
    seqlens = memory.cache_seqlens
    if seqlens.shape != (B,) or seqlens.dtype != torch.int64:
        raise ValueError(f"cache_seqlens must be ({B},) int64, got {tuple(seqlens.shape)} {seqlens.dtype}")
    if can_check_values(seqlens) and B and not 0 <= int(seqlens.min()) <= int(seqlens.max()) <= BLOCK:
        raise ValueError(f"cache_seqlens must lie in 0 to {BLOCK}, got {seqlens.tolist()}")


def _check(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None) -> int:
    """Raise a ValueError for what no backend takes; returns the number of sequences S."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be (B, T, H, D), got {tuple(x.shape)}")
        if not x.is_floating_point() or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"q, k and v must share one floating type and device, got q {q.dtype} on {q.device}, "
                f"{name} {x.dtype} on {x.device}"
            )
    if k.shape != q.shape or v.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"q and k must be equal in shape and v in all but its width, got q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    B, T, H, _ = q.shape
    if log_decay.shape != (H,) or not log_decay.is_floating_point() or log_decay.device != q.device:
        raise ValueError(
            f"log_decay must be ({H},), floating, on {q.device}; got {tuple(log_decay.shape)} "
            f"{log_decay.dtype} on {log_decay.device}"
        )
    if log_decay.requires_grad:
        raise ValueError("log_decay is a constant of the layer and has no gradient; pass log_decay.detach()")
    if can_check_values(log_decay) and not bool(((log_decay <= 0) & log_decay.isfinite()).all()):
        raise ValueError(f"log_decay must be finite and at most 0 (memory fades), got {log_decay.tolist()}")
    if cu_seqlens is None:
        return B
    check_cu_seqlens(cu_seqlens, batch=B, positions=T)
    return len(cu_seqlens) - 1


def _check_state(
    name: str, state: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if tuple(state.shape) != shape:
        raise ValueError(
            f"{name} must be (S, H, Dk, Dv) = {shape}, one state for each sequence, got {tuple(state.shape)}"
        )
    if state.dtype != dtype or state.device != device:
        raise ValueError(f"{name} must be {dtype} on {device}, got {state.dtype} on {state.device}")
