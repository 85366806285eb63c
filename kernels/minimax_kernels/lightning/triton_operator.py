"""The Triton backend as operators of torch.library: torch.compile and autograd see one opaque step."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .triton_backward import backward
from .triton_forward import forward
from .triton_segments import choose_segment_length


def lightning_triton(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Shapes and rules as in `interface.lightning_attention`; no state means zeros."""
    Dk, Dv = q.shape[3], v.shape[3]
    more_k, more_v = -Dk % 8, -Dv % 8  # descriptors want vectors of 16 bytes
    if more_k or more_v:
        q, k, v = pad(q, (0, more_k)), pad(k, (0, more_k)), pad(v, (0, more_v))
        state = None if state is None else pad(state, (0, more_v, 0, more_k))
    out, final_state, _ = lightning(q, k, v, log_decay, state, cu_seqlens)
    return out[..., :Dv], final_state[..., :Dk, :Dv]


@torch.library.custom_op("minimax_kernels::lightning", mutates_args=())
def lightning(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """out, final state, and first states of segments for the backward (empty in one pass)."""
    state = None if state is None else state.contiguous()
    segment_length = choose_segment_length(q, v, _sequences(q, cu_seqlens))
    out, final_state, segment_states = forward(
        q, k, v, log_decay.contiguous(), state, _dense(cu_seqlens), segment_length=segment_length
    )
    return out, final_state, final_state.new_empty(0) if segment_states is None else segment_states


@lightning.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    B, T, H, Dk = q.shape
    Dv = v.shape[3]
    S = _sequences(q, cu_seqlens)
    empty = partial(torch.empty, dtype=torch.float32, device=q.device)
    segment_states = empty(0)
    if segment_length := choose_segment_length(q, v, S):
        count = B * -(-T // segment_length) if cu_seqlens is None else T // segment_length + S
        segment_states = empty(count, H, Dk, Dv)
    return q.new_empty(B, T, H, Dv), empty(S, H, Dk, Dv), segment_states


@torch.library.custom_op("minimax_kernels::lightning_backward", mutates_args=())
def lightning_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    segment_states: Tensor,
    cu_seqlens: Tensor | None,
    dout: Tensor,
    dfinal_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and dstate, which is empty where there was no state."""
    state, dfinal_state = (None if x is None else x.contiguous() for x in (state, dfinal_state))
    segment_length = choose_segment_length(q, v, _sequences(q, cu_seqlens))
    dq, dk, dv, dstate = backward(
        q, k, v, log_decay.contiguous(), state, segment_states if segment_length else None,
        _dense(cu_seqlens), dout, dfinal_state, segment_length=segment_length,
    )  # fmt: skip
    return dq, dk, dv, segment_states.new_empty(0) if state is None or dstate is None else dstate


@lightning_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    segment_states: Tensor,
    cu_seqlens: Tensor | None,
    dout: Tensor,
    dfinal_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dstate = torch.empty(0 if state is None else state.shape, dtype=torch.float32, device=q.device)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dstate


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, log_decay, state, cu_seqlens = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, log_decay, state, output[2], cu_seqlens)
    ctx.mark_non_differentiable(output[2])


def _differentiate(
    ctx: Any, dout: Tensor | None, dfinal_state: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    q, k, v, log_decay, state, segment_states, cu_seqlens = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(v)
    dq, dk, dv, dstate = lightning_backward(
        q, k, v, log_decay, state, segment_states, cu_seqlens, dout, dfinal_state
    )
    return dq, dk, dv, None, None if state is None else dstate, None


lightning.register_autograd(_differentiate, setup_context=_save)


def _sequences(q: Tensor, cu_seqlens: Tensor | None) -> int:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _dense(cu_seqlens: Tensor | None) -> Tensor | None:
    return None if cu_seqlens is None else cu_seqlens.contiguous()
