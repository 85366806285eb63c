"""The one place where a Triton kernel of this folder is launched."""

from collections.abc import Mapping
from contextvars import copy_context

import torch
import triton
from torch import Tensor


def launch(kernel: triton.JITFunction, grid: tuple[int, ...], arguments: Mapping[str, object]) -> None:
    """Launch on the tensors' device, with memory for descriptors; no global setting of Triton changes."""
    tensor = next(x for x in arguments.values() if isinstance(x, Tensor))

    def run() -> None:
        triton.set_allocator(lambda size, _alignment, _stream: tensor.new_empty(size, dtype=torch.int8))
        kernel[grid](**arguments)

    with torch.cuda.device_of(tensor):
        copy_context().run(run)
