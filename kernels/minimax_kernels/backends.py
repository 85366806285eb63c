"""What a machine and a tensor allow: which backend runs, in which type sums are taken, whether autograd
follows, and whether a check may read values.

`reference` is the definition, `chunked` plain PyTorch by blocks, `triton` the Hopper kernels.
A named backend runs or raises; only "auto" chooses.
"""

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

Backend = Literal["auto", "reference", "chunked", "triton"]
NAMES = ("reference", "chunked", "triton")
# Where the kernels are meant for and compile without spills; elsewhere they run if asked for.
TRITON_CAPABILITIES = ((9, 0),)
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_HAS_TRITON = find_spec("triton") is not None


def has_triton() -> bool:
    return _HAS_TRITON


def _interpreting() -> bool:
    """Whether Triton runs its kernels in its own interpreter, on the CPU."""
    if not has_triton():
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def available() -> list[str]:
    """Backends that can run on this machine."""
    triton = has_triton() and (torch.cuda.is_available() or _interpreting())
    return [name for name in NAMES if name != "triton" or triton]


def choose(backend: str, x: Tensor) -> str:
    """The backend that will work on `x`; "auto" takes `triton` on a Hopper GPU, else `chunked`."""
    if backend == "auto":
        return "triton" if x.is_cuda and _is_made_for(x) else "chunked"
    if backend not in NAMES:
        raise ValueError(f"backend {backend!r} is unknown; choose 'auto' or one of {list(NAMES)}")
    if backend == "triton":
        if not has_triton():
            raise ValueError("backend 'triton' needs triton: pip install 'minimax-hybrid[triton]'")
        # torch.compile cannot trace the interpreter's flag; there the launch itself refuses.
        if not (x.is_cuda or torch.compiler.is_compiling() or _interpreting()):
            raise ValueError(
                f"backend 'triton' needs tensors on a GPU, got {x.device}; move them, use backend='chunked', "
                "or run Triton's interpreter with TRITON_INTERPRET=1"
            )
        if x.dtype not in TRITON_DTYPES:
            raise ValueError(
                f"backend 'triton' takes {list(TRITON_DTYPES)}, got {x.dtype}; use backend='chunked'"
            )
    return backend


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """The type that sums over these are taken in: float32, or float64 if one of them has it."""
    dtype = torch.float32
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def tracked(*tensors: Tensor | None) -> bool:
    """Whether autograd follows what is computed from these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def tracing() -> bool:
    """Whether torch.compile or torch.export records the operations, so that none may depend on values."""
    return torch.compiler.is_compiling() or torch.compiler.is_exporting()


def writable(x: Tensor) -> bool:
    """Whether this mode may write into x: not into an inference tensor outside inference mode."""
    return not x.is_inference() or torch.is_inference_mode_enabled()


def can_check_values(x: Tensor) -> bool:
    """Whether a check may read values: not on a GPU, which would wait, nor in a trace."""
    return x.device.type == "cpu" and not tracing()


def _is_made_for(x: Tensor) -> bool:
    """Whether the Triton kernels are meant for the GPU and type of x."""
    capability = torch.cuda.get_device_capability(x.device)
    return has_triton() and x.dtype in TRITON_DTYPES and capability in TRITON_CAPABILITIES


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context in which types stay as we chose them, on x's device; free where autocast is off."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def full_float32(x: Tensor) -> AbstractContextManager:
    """A context in which products of float32 on x's device are IEEE float32, and types stay as we chose them.

    A trainer's tf32=True, or set_float32_matmul_precision("high"), is for the model's other products; under
    it a head or router would compute with 10 bits of mantissa. A compiled graph keeps the setting that it is
    traced under.
    """
    return without_autocast(x) if tracing() else _FullFloat32(x)


class _FullFloat32(AbstractContextManager):
    def __init__(self, x: Tensor):
        self._autocast = without_autocast(x)
        backends: Any = torch.backends  # torch has no annotation for mkldnn's
        self._backend = backends.cuda.matmul if x.is_cuda else backends.mkldnn.matmul
        self._before = "ieee"

    def __enter__(self) -> None:
        self._autocast.__enter__()
        self._before = self._backend.fp32_precision
        if self._before != "ieee":
            self._backend.fp32_precision = "ieee"

    def __exit__(self, *error: Any) -> None:
        if self._before != "ieee":
            self._backend.fp32_precision = self._before
        self._autocast.__exit__(*error)
