"""Operators of hybrid lightning-attention models. They know tensors, not layers."""

from .lightning.interface import lightning_attention, lightning_decode
from .packing import BLOCK, cu_seqlens_from_lengths, pack, unpack

__all__ = ["BLOCK", "cu_seqlens_from_lengths", "lightning_attention", "lightning_decode", "pack", "unpack"]
