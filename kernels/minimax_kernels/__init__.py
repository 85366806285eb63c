"""Operators of hybrid lightning-attention models. They know tensors, not layers."""

from .gemm import linear
from .grouped.interface import grouped_linear
from .lightning.interface import lightning_attention, lightning_decode
from .log_probs.interface import token_log_probs
from .log_probs.logits import fp32_linear
from .log_probs.reference import IGNORED
from .norm import rms_norm
from .packing import BLOCK, cu_seqlens_from_lengths, pack, unpack

__all__ = [
    "BLOCK",
    "IGNORED",
    "cu_seqlens_from_lengths",
    "fp32_linear",
    "grouped_linear",
    "lightning_attention",
    "lightning_decode",
    "linear",
    "pack",
    "rms_norm",
    "token_log_probs",
    "unpack",
]
