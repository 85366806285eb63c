"""Gradients of lightning attention: the forward's own sweep on other operands, with time and against it.

The state's gradient runs backwards, dstate[t] = outer(q[t], dout[t]) + exp(log_decay) dstate[t+1], and

    dq[t] = dout[t] @ state[t].mT      a sweep of (dout, v, k) from the transposed first state
    dv[t] = k[t] @ dstate[t]           a reverse sweep of (k, q, dout) from dlast; it ends in dstate
    dk[t] = v[t] @ dstate[t].mT        a reverse sweep of (v, dout, q) from the transposed dlast
"""

from torch import Tensor

from .triton_forward import sweep
from .triton_segments import cut, scan


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    starts: Tensor | None,
    cu_seqlens: Tensor | None,
    dout: Tensor,
    dlast: Tensor | None,
    *,
    segment: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and dstate (None without a state).

    `starts` and `segment` are those of the forward, see `triton_forward.forward`.
    """
    B, T = q.shape[:2]
    S = B if cu_seqlens is None else len(cu_seqlens) - 1
    pieces = cut(B, T, cu_seqlens, segment)
    ends, dstate = dlast, None
    if starts is not None:
        gain = pieces.new_states(q, dout)
        sweep(None, q, dout, log_decay, pieces, last=gain, reverse=True)
        ends, dstate = scan(gain, log_decay, pieces, T, S, state=dlast, reverse=True)
        state = starts
    first = pieces.new_states(q, dout) if state is not None and starts is None else None
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    sweep(dout, v, k, log_decay, pieces, state=state, out=dq, transposed=True)
    sweep(k, q, dout, log_decay, pieces, state=ends, out=dv, last=first, reverse=True)
    sweep(v, dout, q, log_decay, pieces, state=ends, out=dk, reverse=True, transposed=True)
    return dq, dk, dv, dstate if first is None else first
