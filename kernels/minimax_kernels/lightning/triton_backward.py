"""Gradients of lightning attention: the forward's own sweep on other operands, with time and against it.

The state's gradient runs backwards, dstate[t] = outer(q[t], dout[t]) + exp(log_decay) dstate[t+1], and

    dq[t] = dout[t] @ state[t].mT      a sweep of (dout, v, k) from the transposed first state
    dv[t] = k[t] @ dstate[t]           a reverse sweep of (k, q, dout) from dfinal_state; it ends in dstate
    dk[t] = v[t] @ dstate[t].mT        a reverse sweep of (v, dout, q) from the transposed dfinal_state
"""

from torch import Tensor

from .triton_forward import sweep
from .triton_segments import partition, scan


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    segment_states: Tensor | None,
    cu_seqlens: Tensor | None,
    dout: Tensor,
    dfinal_state: Tensor | None,
    *,
    segment_length: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and dstate (None without a state).

    `segment_states` and `segment_length` are those of the forward, see `triton_forward.forward`.
    """
    B, T = q.shape[:2]
    S = B if cu_seqlens is None else len(cu_seqlens) - 1
    segments = partition(B, T, cu_seqlens, segment_length)
    dsegment_states, dstate = dfinal_state, None
    if segment_states is not None:
        increments = segments.new_states(q, dout)
        sweep(None, q, dout, log_decay, segments, final_state=increments, reverse=True)
        dsegment_states, dstate = scan(
            increments, log_decay, segments, T, S, state=dfinal_state, reverse=True
        )
        state = segment_states
    first = segments.new_states(q, dout) if state is not None and segment_states is None else None
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    sweep(dout, v, k, log_decay, segments, state=state, out=dq, transposed=True)
    sweep(k, q, dout, log_decay, segments, state=dsegment_states, out=dv, final_state=first, reverse=True)
    sweep(v, dout, q, log_decay, segments, state=dsegment_states, out=dk, reverse=True, transposed=True)
    return dq, dk, dv, dstate if first is None else first
