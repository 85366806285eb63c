"""Operators of hybrid lightning-attention models. They know tensors, not layers."""

from .gemm import linear
from .grouped.interface import grouped_linear
from .head import fp32_linear
from .lightning.extend import current_state, extend, extend_packed, fold, padded_lightning_attention
from .lightning.interface import lightning_attention, lightning_decode
from .lightning.memory import BLOCK, BlockMemory
from .lightning.reference import attention_matrix
from .log_probs.interface import token_log_probs
from .log_probs.reference import IGNORED
from .norm import rms_norm
from .packing import cu_seqlens_from_lengths, pack, unpack

__all__ = [
    "BLOCK",
    "BlockMemory",
    "IGNORED",
    "attention_matrix",
    "cu_seqlens_from_lengths",
    "current_state",
    "extend",
    "extend_packed",
    "fold",
    "fp32_linear",
    "grouped_linear",
    "lightning_attention",
    "lightning_decode",
    "linear",
    "pack",
    "padded_lightning_attention",
    "rms_norm",
    "token_log_probs",
    "unpack",
]
