"""The output head in float32: the report's repair for training and inference that disagree (section 3.2).

It speaks of arithmetic and result, not of storage: a bfloat16 weight stays bfloat16 and is multiplied
exactly. To round the logits to bfloat16 and cast them up afterwards, as the released code does, is the fault
itself.
"""

import torch
from minimax_kernels import fp32_linear
from torch import Tensor, nn


class LMHead(nn.Linear):
    """Hidden states (..., M) to next-token logits (..., V) in `config.head_dtype`; at least float32 by
    default."""

    def __init__(self, width: int, vocab_size: int, *, head_dtype: str):
        super().__init__(width, vocab_size, bias=False)
        self.head_dtype = getattr(torch, head_dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.head_dtype == torch.float32:
            return fp32_linear(hidden, self.weight)
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.to(self.head_dtype), self.weight.to(self.head_dtype))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, head_dtype={self.head_dtype}"
