"""Prefill of a long prompt in pieces, in memory that does not grow with piece times past.

A lightning layer carries its state from piece to piece. A softmax layer attends, for T new positions after P
cached ones, to the past without a mask and to the piece itself causally; the two are merged by log-sum-exp:

    out = w out_past + (1 - w) out_piece,     w = sigmoid(lse_past - lse_piece)

so that no mask of T x (P + T) exists. It is transformers' attention interface under the name "piecewise":
`model.set_attn_implementation("piecewise")` uses it everywhere, `prefill` only while it runs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cache import HybridCache
from .model import MiniMaxM1ForCausalLM

NAME = "piecewise"


@torch.inference_mode()
def prefill(
    model: MiniMaxM1ForCausalLM,
    input_ids: Tensor,
    *,
    piece: int = 8192,
    cache: HybridCache | None = None,
    after_piece: Callable[[int], None] = lambda done: None,
) -> tuple[Tensor, HybridCache]:
    """Run a prompt through the model piece by piece.

    Args:
        input_ids: (B, T) without padding.
        piece: positions of one forward pass.
        cache: continue what it holds (written into); a new one if None.
        after_piece: called with the number of positions done, for a progress bar or to save the cache.

    Returns:
        logits (B, V) after the last position, and the cache.
    """
    if piece < 1 or input_ids.ndim != 2 or not input_ids.shape[1]:
        raise ValueError(
            f"prefill takes (B, T) tokens with T of at least 1 and a piece of at least 1, got "
            f"{tuple(input_ids.shape)} and {piece}"
        )
    cache = HybridCache(model.config) if cache is None else cache
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        for start in range(0, input_ids.shape[1], piece):
            part = input_ids[:, start : start + piece]
            logits = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            after_piece(start + part.shape[1])
    finally:
        model.set_attn_implementation(before)
    return logits[:, -1], cache


def piecewise_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of q (B, H, T, D) to k, v (B, Hkv, P + T, D) as (B, T, H, D); by SDPA if masked."""
    T, P = query.shape[2], key.shape[2] - query.shape[2]
    if attention_mask is not None or P == 0 or T == 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    differentiate = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    if query.device.type != "cpu" or differentiate or dropout:
        # on a GPU this mask is a number for the kernel, not a tensor
        mask = causal_lower_right(T, P + T)
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None
    past, lse_past = _attend(query, key[:, :, :P], value[:, :, :P], causal=False, scale=scaling)
    tail, lse_tail = _attend(query, key[:, :, P:], value[:, :, P:], causal=True, scale=scaling)
    weight = torch.sigmoid(lse_past - lse_tail)[..., None]  # (B, H, T, 1) float32
    out = torch.lerp(tail.to(weight.dtype), past.to(weight.dtype), weight).to(query.dtype)
    return out.transpose(1, 2).contiguous(), None


def _attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """SDPA's CPU kernel, with the log-sum-exp (B, H, T) of every row of scores."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def piecewise_mask(
    *, attention_mask: Tensor | None = None, allow_is_causal_skip: bool = True, **kwargs: Any
) -> Tensor | None:
    """No mask where nothing is padded or packed; else SDPA's."""
    if attention_mask is None and allow_is_causal_skip:
        return None
    return sdpa_mask(attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(NAME, piecewise_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, piecewise_mask)
