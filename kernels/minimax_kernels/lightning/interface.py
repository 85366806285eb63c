"""Lightning attention (MiniMax-01 report, section 2.2): `lightning_attention` for many positions,
`lightning_decode` for one; their checks and the choice of backend."""

import torch
from torch import Tensor

from ..backends import Backend, choose, without_autocast
from ..packing import BLOCK, can_check_values, check_cu_seqlens
from .chunked import chunked
from .chunked import decode as chunked_decode
from .reference import recurrence


def lightning_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Causal linear attention whose memory fades a little at every step.

        state[t] = exp(log_decay) * state[t-1] + outer(k[t], v[t])
        out[t]   = q[t] @ state[t]

    Differentiable in q, k, v and state, through both results. Sums are in float32 (float64 for float64
    inputs), under autocast too.

    Args:
        q, k: (B, T, H, Dk), already activated.
        v: (B, T, H, Dv), of the same type.
        log_decay: (H,) float, at most 0; a constant.
        state: (S, H, Dk, Dv) memory to start from, float32 (float64 for float64 inputs); zeros if None.
        cu_seqlens: (S + 1,) int32 or int64 bounds of packed sequences, B = 1; without it S = B.
        backend: "auto", "reference", "chunked" or "triton".

    Returns:
        out (B, T, H, Dv) in v's type, zero at rows past the last bound, and the last state (S, H, Dk, Dv).

    Raises:
        ValueError: shapes, types or devices that do not fit, a log_decay above 0 or one that requires grad.
    """
    S = _check(q, k, v, log_decay, cu_seqlens)
    _, _, H, Dk = q.shape
    Dv = v.shape[-1]
    work = _work_type(q)
    if state is not None:
        _check_state(state, (S, H, Dk, Dv), work, q.device)
    name = choose(backend, q)
    with without_autocast(q):
        if name == "triton":
            from .triton_operator import lightning_triton

            return lightning_triton(q, k, v, log_decay, state, cu_seqlens)
        if state is None:
            state = torch.zeros(S, H, Dk, Dv, dtype=work, device=q.device)
        run = {"reference": recurrence, "chunked": chunked}[name]
        return run(q, k, v, log_decay, state, cu_seqlens)


@torch.no_grad()
def lightning_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    state: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    counts: Tensor,
    backend: Backend = "auto",
) -> Tensor:
    """The next token of every sequence, by replaying its open block: bit for bit the forward's row.

    A sequence's memory is the state at its last block boundary and the k, v rows since. The new row is
    appended and computed with the forward's own tile. A block that is full when the call begins is folded
    into the state first, so the rows of the last call can still be taken back by lowering `counts`.

    Writes into `state`, `k_cache`, `v_cache` and `counts`: the one operator that changes what it is given.

    Args:
        q, k: (B, 1, H, Dk), already activated.
        v: (B, 1, H, Dv).
        log_decay: (H,) float, at most 0.
        state: (B, H, Dk, Dv) float32, memory at the start of the open block.
        k_cache, v_cache: (B, R, H, Dk) and (B, R, H, Dv), R >= 64, in the type of q;
            the first counts[b] are held.
        counts: (B,) int64, rows held by each sequence, 0 to 64.
        backend: "auto", "chunked" or "triton" ("reference" steps the recurrence over the rows).

    Returns:
        out (B, 1, H, Dv) in v's type.
    """
    _check(q, k, v, log_decay, None)
    B, T, H, Dk = q.shape
    Dv = v.shape[-1]
    if T != 1:
        raise ValueError(f"lightning_decode takes one position, got {T}; use lightning_attention for more")
    _check_state(state, (B, H, Dk, Dv), _work_type(q), q.device)
    for name, rows, D in (("k_cache", k_cache, Dk), ("v_cache", v_cache, Dv)):
        if rows.ndim != 4 or rows.shape[0] != B or rows.shape[1] < BLOCK or rows.shape[2:] != (H, D):
            raise ValueError(
                f"{name} must be ({B}, R, {H}, {D}) with R of at least {BLOCK}, got {tuple(rows.shape)}"
            )
        if rows.dtype != q.dtype:
            raise ValueError(f"{name} must have the type of q, {q.dtype}, got {rows.dtype}")
    if counts.shape != (B,) or counts.dtype != torch.int64:
        raise ValueError(f"counts must be ({B},) int64, got {tuple(counts.shape)} {counts.dtype}")
    if can_check_values(counts) and B and not 0 <= int(counts.min()) <= int(counts.max()) <= BLOCK:
        raise ValueError(f"counts must lie in 0 to {BLOCK}, got {counts.tolist()}")
    step = {"reference": _decode_reference, "chunked": chunked_decode}
    chosen = choose(backend, q)
    if chosen == "triton":
        from .triton_decode import decode_triton

        step["triton"] = decode_triton
    with without_autocast(q):
        return step[chosen](q, k, v, log_decay, state=state, k_cache=k_cache, v_cache=v_cache, counts=counts)


def _decode_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    state: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    counts: Tensor,
) -> Tensor:
    outs = []
    for b, count in enumerate(counts.tolist()):
        one = slice(b, b + 1)
        if count == BLOCK:
            k_block, v_block = k_cache[one, :BLOCK], v_cache[one, :BLOCK]
            state[one] = recurrence(k_block, k_block, v_block, log_decay, state[one], None)[1]
            count = 0
        k_cache[b, count], v_cache[b, count] = k[b, 0], v[b, 0]
        counts[b] = count + 1
        k_open, v_open = k_cache[one, : count + 1], v_cache[one, : count + 1]
        last = recurrence(k_open, k_open, v_open, log_decay, state[one], None)[1]
        outs.append((q[one, 0, :, None].to(last.dtype) @ last).squeeze(-2))
    return torch.stack(outs, dim=0).to(v.dtype) if outs else torch.zeros_like(v)


def _work_type(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


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


def _check_state(state: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if tuple(state.shape) != shape:
        raise ValueError(
            f"state must be (S, H, Dk, Dv) = {shape}, one row for each sequence, got {tuple(state.shape)}"
        )
    if state.dtype != dtype or state.device != device:
        raise ValueError(f"state must be {dtype} on {device}, got {state.dtype} on {state.device}")
